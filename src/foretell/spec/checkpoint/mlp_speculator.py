"""MLPSpeculator checkpoints (IBM's `*-accelerator`): `speculator.{emb,proj,head,ln}.{i}`, tied or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.spec.checkpoint.intake import Intake
from foretell.spec.checkpoint.source import Checkpoint
from foretell.spec.checkpoint.vocabularies import whole
from foretell.spec.mlp_speculator import MlpSpeculator
from foretell.spec.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class MlpSpeculatorReading:
    """What was read."""

    net: MlpSpeculator
    vocabulary: Vocabulary
    notes: tuple[str, ...]


def read_mlp_speculator(checkpoint: Checkpoint, target: Decoder) -> MlpSpeculatorReading:
    """Build the network for `target`.

    Raises:
        ValueError: names the key or tensor and the remedy.
    """
    config, base = checkpoint.config, target.config
    intake = Intake(
        checkpoint, target.dtype, target.device, lambda name: name.removeprefix("speculator.")
    )
    heads = config.get("n_predict", 3)
    width, size = config.get("emb_dim", base.hidden_size), config.get("vocab_size", base.vocab_size)
    if (width, size) != (base.hidden_size, base.vocab_size):
        raise intake.refuse(
            f"config.json says emb_dim={width} and vocab_size={size}, the target has {base.hidden_size} and "
            f"{base.vocab_size}; use the speculator trained for this target"
        )
    inner, tied = config.get("inner_dim") or width, bool(config.get("tie_weights", False))
    one = 1 if tied else heads
    net = MlpSpeculator(
        heads=heads,
        emb=_take(intake, "emb.{}.weight", heads, one, (size, inner)),
        proj=[
            *_take(intake, "proj.{}.weight", 1, 1, (inner, width)),
            *_take(
                intake, "proj.{}.weight", heads, min(2, heads) if tied else heads, (inner, inner), 1
            ),
        ],
        head=_take(intake, "head.{}.weight", heads, one, (size, inner)),
        ln_weight=_take(intake, "ln.{}.weight", heads, one, (inner,)),
        ln_bias=_take(intake, "ln.{}.bias", heads, one, (inner,)),
        scale_input=bool(config.get("scale_input", False)),
    )
    intake.close("speculator.emb.{i}, proj.{i}, head.{i} and ln.{i}")
    intake.note(f"MLPSpeculator: {heads} heads{', tied' if tied else ''}")
    return MlpSpeculatorReading(net, whole(size, target.device), tuple(intake.notes))


def _take(
    intake: Intake, name: str, heads: int, needed: int, shape: tuple[int, ...], first: int = 0
) -> list[Tensor]:
    """Tensors `first` to `needed`; of tied weights a file may hold one copy or one per head."""
    taken = [intake.take(name.format(i), *shape) for i in range(first, needed)]
    intake.put_aside([name.format(i) for i in range(needed, heads)], "tied")
    return taken

"""LLM: the offline API. Prompts in, texts out, in vLLM's words.

It tokenises, queues, steps the engine and hands out what comes; it decides nothing about scheduling or sampling.
Several streams may be open at once, and several threads may call: whichever call steps the engine brings all forward.

Invariant: whatever ends a call early (an error, Ctrl-C, a stream that is closed) aborts what the call queued, and the
LLM stays usable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from foretell import arguments
from foretell.assembly import Assembly
from foretell.config import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Compat,
    DType,
    EngineConfig,
    Policy,
)
from foretell.defaults import sampling_defaults
from foretell.driver import Driver
from foretell.jobs import Job, Limits, make_jobs
from foretell.metrics import Metrics, Recorder
from foretell.outputs import RequestOutput
from foretell.progress import Progress
from foretell.prompts import (
    CHAT_ARGUMENTS,
    ChatArguments,
    Message,
    Prompt,
    PromptInput,
    chat_options,
    encode,
    encode_chat,
    read_conversations,
    read_prompts,
    read_template,
)
from foretell.sampling_params import MAX_LOGPROBS, SamplingParams
from foretell.served import serve_target
from foretell.speculation import resolve_speculation
from foretell.text import Tokenizer, TokenText

if TYPE_CHECKING:
    from foretell.engine.engine import Engine
    from foretell.spec.compat import CompatReport
    from foretell.spec.resolved import Resolved

Conversation = Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams] | None
_CALL = ("prompts", "messages", "sampling_params", "use_tqdm", "priority")


@dataclass(frozen=True, slots=True)
class LLMParts:
    """What an LLM is made of."""

    config: EngineConfig
    driver: Driver
    tokenizer: Tokenizer
    recorder: Recorder
    defaults: SamplingParams
    chat_template: str | None


class LLM:
    """A model that generates text, speculatively if it is given a drafter.

    Args:
        model: directory, GGUF file or hub name; None = the default model. A drafter in speculators' format stands for
            its target, drafted for by it.
        speculate_model: a checkpoint that drafts (a smaller model, Medusa, EAGLE-1 to 3, MTP, MLPSpeculator, PARD; what
            it is is found out), or "ngram".
        num_speculative_tokens: tokens to draft per step; see DraftCheckpoint for what it means for each drafter.
        speculative_config: all keys of speculation (see speculation.KEYS), as in vLLM.
        tokenizer: where the tokenizer comes from; None = the model.
        chat_template: Jinja text, or the path of a file with it; None = the model's own.
        dtype: a name, "half" and "float" among them, or one of torch's.
        others: see EngineConfig. Arguments that only vLLM has are refused by name, with what to do instead.

    Raises:
        ValueError: an argument is unknown, unsupported or out of range, or models and sizes do not fit.

    Example:
        >>> with LLM(speculate_model="ngram", num_speculative_tokens=4) as llm:  # doctest: +SKIP
        ...     print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        speculate_model: str | PathLike[str] | None = None,
        num_speculative_tokens: int | None = None,
        speculative_config: Mapping[str, object] | None = None,
        tokenizer: str | PathLike[str] | None = None,
        revision: str | None = None,
        chat_template: str | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        dtype: DType | object = "auto",
        device: str = "auto",
        seed: int = 0,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        block_size: int = BLOCK_SIZE,
        enable_prefix_caching: bool = True,
        scheduling_policy: Policy = "fcfs",
        max_logprobs: int = MAX_LOGPROBS,
        enforce_eager: bool = False,
        deterministic: bool = False,
        compat: Compat = "full",
        trace: str | bool | None = None,
        **others: object,  # only to refuse vLLM's by name, with a remedy
    ) -> None:
        arguments.refuse(
            others, [name for name in inspect.signature(LLM).parameters if name != "others"]
        )
        template = None if chat_template is None else read_template(chat_template)
        drafter = arguments.name_of(speculate_model)
        served = serve_target(arguments.name_of(model), revision, drafter, speculative_config)
        speculation = resolve_speculation(
            drafter, num_speculative_tokens, served.speculative_config
        )
        config = EngineConfig(
            model=served.model,
            tokenizer=arguments.name_of(tokenizer),
            revision=served.revision,
            dtype=arguments.dtype_of(dtype),
            device=device,
            seed=seed,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            tensor_parallel_size=tensor_parallel_size,
            scheduling_policy=scheduling_policy,
            max_logprobs=max_logprobs,
            enforce_eager=enforce_eager,
            deterministic=deterministic,
            compat=compat,
            trace=trace,
            drafter=speculation.drafter,
            acceptance=speculation.acceptance,
            tree=speculation.tree,
            adaptive=speculation.adaptive,
        )
        # Here, so that importing foretell needs no torch.
        from foretell.engine.build import build_engine
        from foretell.model.hub import resolve
        from foretell.planning import refuse_too_large

        refuse_too_large(config)
        recorder = Recorder()
        engine, made = build_engine(config, recorder)
        self._start(config, engine, cast("Tokenizer", made), recorder, template)
        self._defaults = sampling_defaults(resolve(config.model, config.revision).path)

    @classmethod
    def around(
        cls,
        config: EngineConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        recorder: Recorder | None = None,
    ) -> Self:
        """An LLM around an engine that exists already, such as one of models made in memory.

        Args:
            recorder: the engine's watcher, if it has one.
        """
        llm = cls.__new__(cls)
        llm._start(config, engine, tokenizer, recorder or Recorder(), None)
        return llm

    def _start(
        self,
        config: EngineConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        recorder: Recorder,
        template: str | None,
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._template = template
        self._defaults = SamplingParams()
        self._driver: Driver | None = Driver(engine, TokenText(tokenizer), recorder, config.seed)

    # Generation.

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        **others: object,  # here and below only to refuse vLLM's by name, with a remedy
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
            sampling_params: for all prompts, or one per prompt; None = `get_default_sampling_params()`.
            use_tqdm: show a progress bar on a terminal; or a function that makes one.
            priority: one number per prompt, lower first; needs scheduling_policy="priority".

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: a prompt or parameter does not fit; nothing was queued then.
            KeyboardInterrupt: Ctrl-C; what this call queued is aborted, the LLM stays usable.
        """
        arguments.refuse(others, _CALL, "LLM.generate", arguments.CALLS)
        return self._run(self._jobs(self._encode(prompts), sampling_params, priority), use_tqdm)

    def stream(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
        **others: object,
    ) -> Generator[RequestOutput]:
        """Continue prompts, one output whenever a request has something new, in the order it comes.

        `SamplingParams.output_kind` says whether an output holds everything so far (the default), only what is new,
        or comes once at the end. Arguments are checked at once; requests are queued with the first `next`. Closing
        the generator aborts what still runs.

        Args, Raises: as `generate`.
        """
        arguments.refuse(others, _CALL, "LLM.stream", arguments.CALLS)
        return self._stream(self._jobs(self._encode(prompts), sampling_params, priority))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        **options: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            options: how they become prompts; see prompts.ChatArguments.
            others: as `generate`.

        Raises:
            ValueError: as `generate`; also if there is no chat template or it refuses the messages.
        """
        return self._run(self._chats(messages, sampling_params, priority, options), use_tqdm)

    def stream_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
        **options: Unpack[ChatArguments],
    ) -> Generator[RequestOutput]:
        """`chat`, as `stream` is to `generate`."""
        return self._stream(self._chats(messages, sampling_params, priority, options))

    def abort(self, request_id: str) -> None:
        """End a request; what it has so far is its output. Unknown and finished ids are no error."""
        self._open.drop(self._open.running(request_id))

    # State.

    def get_metrics(self) -> Metrics:
        """What was counted since the start; `later.since(earlier)` gives what one call added."""
        driver = self._driver
        return self._recorder.snapshot() if driver is None else driver.metrics()

    @property
    def resolved(self) -> Resolved:
        """What drafts, as it was found out at the start: method, checkpoint, tree, layers, decisions."""
        return self._open.engine.resolved

    @property
    def compat(self) -> CompatReport | None:
        """What the start found out about drafter and target; None = nothing to prove, or compat="off"."""
        return self._open.engine.compat

    def parts(self) -> LLMParts:
        """What it is made of, for whoever drives the engine by itself, as a server does; do not use the LLM then."""
        return LLMParts(
            self.config, self._open, self._tokenizer, self._recorder, self._defaults, self._template
        )

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, of the transformers library."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds when none are given: SamplingParams' defaults, changed by the model's generation_config."""
        return self._defaults

    def reset_prefix_cache(self) -> None:
        """Forget the KV of all finished text."""
        self._open.engine.reset_prefix_cache()

    def close(self) -> None:
        """Abort everything and let go of the model; the LLM cannot be used afterwards."""
        if self._driver is not None:
            self._driver.drop(self._driver.running())
            self._driver = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _open(self) -> Driver:
        if self._driver is None:
            raise RuntimeError("this LLM was closed; make a new one")
        return self._driver

    # From arguments to jobs.

    def _encode(self, prompts: PromptInput | Sequence[PromptInput]) -> list[Prompt]:
        given = read_prompts(prompts)
        return [encode(one, self._tokenizer, f"prompt {place}") for place, one in enumerate(given)]

    def _chats(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params,
        priority: Sequence[int] | None,
        given: ChatArguments,
    ) -> list[Job]:
        others = {name: value for name, value in given.items() if name not in CHAT_ARGUMENTS}
        arguments.refuse(others, (*_CALL, *CHAT_ARGUMENTS), "LLM.chat", arguments.CALLS)
        options = chat_options(given, self._template)
        prompts = [
            encode_chat(one, self._tokenizer, options, f"conversation {place}")
            for place, one in enumerate(read_conversations(messages))
        ]
        return self._jobs(prompts, params, priority)

    def _jobs(
        self, prompts: Sequence[Prompt], params: Params, priority: Sequence[int] | None
    ) -> list[Job]:
        engine = self._open.engine
        limits = Limits(
            engine.vocab_size,
            engine.max_model_len,
            self.config.max_logprobs,
            priorities=self.config.scheduling_policy == "priority",
        )
        return make_jobs(
            prompts,
            self._defaults if params is None else params,
            priority,
            limits,
        )

    # From jobs to outputs.

    def _run(self, jobs: Sequence[Job], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        driver, assemblies = self._open, list[Assembly]()
        try:
            with Progress(use_tqdm, len(jobs)) as progress:
                driver.queue(jobs, assemblies)
                running = assemblies
                while running := self._report(running, progress):
                    driver.pump()
        except BaseException:  # KeyboardInterrupt above all
            driver.drop(assemblies)
            raise
        return [assembly.output() for assembly in assemblies]

    def _report(self, running: Sequence[Assembly], progress: Progress) -> list[Assembly]:
        """Those that go on; the progress bar hears of the others."""
        for assembly in running:
            if assembly.finished:
                progress.finished(assembly.num_prompt_tokens, assembly.num_generated_tokens)
        return [assembly for assembly in running if not assembly.finished]

    def _stream(self, jobs: Sequence[Job]) -> Generator[RequestOutput]:
        driver, assemblies = self._open, list[Assembly]()
        try:
            driver.queue(jobs, assemblies)
            open_ones = list(assemblies)
            while open_ones:
                for assembly in open_ones:
                    output = driver.news(assembly)
                    if output is not None:
                        yield output
                open_ones = [one for one in open_ones if not one.finished or one.has_news]
                if open_ones and not any(one.has_news for one in open_ones):
                    driver.pump()
        finally:
            driver.drop(assemblies)

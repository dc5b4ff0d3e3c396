"""The operations of a CUDA device: Triton kernels, and cuBLAS for products where it is faster than our own."""

from __future__ import annotations

from foretell.ops.table import OpTable
from foretell.ops.triton import attention, experts, layers, linear, ngram, rows, sample, verify

CUDA = OpTable(
    embed=layers.embed,
    rms_norm=layers.rms_norm,
    rope_store=layers.rope_store,
    mask=attention.mask,
    attention=attention.attention,
    act_mul=layers.act_mul,
    repacks=linear.repacks,
    pack_linear=linear.pack_linear,
    linear=linear.linear,
    gated=linear.gated,
    pack_experts=experts.pack_experts,
    experts=experts.experts,
    argmax=sample.argmax_checked,
    angles=layers.angles,
    gather=rows.gather,
    decide=verify.decide,
    keep_features=verify.keep_features,
    kv_pages=verify.kv_pages,
    move_kv=verify.move_kv,
    place=rows.place,
    last_rows=rows.last_rows,
    ngram=ngram.draft,
    draw=sample.sample,
)

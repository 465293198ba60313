"""What tensor parallelism changes without being told: replicated heads, a padded vocabulary, keys without effect.

And that it divides a sequence under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.grid import Axis
from parcompile.machines.accelerator import accelerators
from parcompile.spec.resolve import Resolution

from .c_sequence import length_finding
from .places import also, model_path
from .registry import Finding, rule

_TP = ("parallelism", "tp")


@rule(
    "T003",
    "kv heads are replicated",
    """With fewer kv heads than tensor-parallel ranks, several ranks hold the same head: its weights take memory on each
    of them and their gradients are summed.""",
    wrong={"model": {"preset": "gemma-2b"}, "parallelism": {"tp": 8}},
    right={"model": {"preset": "gemma-7b"}, "parallelism": {"tp": 8}},
    severity=Severity.INFO,
    sources=("Megatron-Core attention.py",),
)
def replicated_kv_heads_are_shown(spec: Resolution) -> Iterator[Finding]:
    """Says how many ranks share a head."""
    tp = spec.axis(Axis.TP)
    for heads in spec.shape.kv_head_counts:
        if tp <= heads or tp % heads:
            continue
        yield Finding(
            f"num_key_value_heads {heads} < tp {tp}: each kv head is held by {tp // heads} ranks",
            _TP,
            related=also(spec, model_path(spec, "num_key_value_heads")),
        )


@rule(
    "T005",
    "the vocabulary is padded",
    """Embedding and head are split over tp after padding the vocabulary to a multiple of make_vocab_size_divisible_by ·
    tp. Padded rows never receive a token or a gradient; a checkpoint is exported without them.""",
    wrong={"model": {"preset": "gpt2-medium"}, "training": {"sequence_length": 1024}},
    right={"model": {"preset": "llama-3-8b"}},
    severity=Severity.INFO,
    sources=("Megatron-LM vocab_utils.py; Megatron-LM#1754",),
)
def padded_vocabulary_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says the padded size."""
    vocab, padded, tp = spec.shape.vocab_size, spec.padded_vocab_size, spec.axis(Axis.TP)
    if padded != vocab:
        yield Finding(
            f"vocab_size {vocab} is padded to {padded}, a multiple of {spec.make_vocab_size_divisible_by} · tp {tp}",
            ("parallelism", "make_vocab_size_divisible_by"),
            help=f"another tp pads to another size; {padded - vocab} rows are never used",
        )


@rule(
    "T006",
    "sequence parallelism has no effect",
    """Sequence parallelism splits activations over the tensor-parallel ranks; with tp 1 there is nothing to split,
    and it is switched off.""",
    wrong={"parallelism": {"sequence_parallel": True}},
    right={"parallelism": {"tp": 2, "sequence_parallel": True}},
    severity=Severity.WARNING,
    sources=("Megatron-LM arguments.py",),
)
def sequence_parallel_needs_tp(spec: Resolution) -> Iterator[Finding]:
    """Fires when sequence_parallel is on at tp 1."""
    path = ("parallelism", "sequence_parallel")
    if spec.sequence_parallel and spec.axis(Axis.TP) == 1:
        yield Finding(
            "sequence_parallel has no effect with tp 1: the plan switches it off",
            path,
            help="remove it, or set tp to 2 or more",
            fixes=(Fix("remove sequence_parallel", Safety.SAFE, (Edit(path, remove=True),)),),
            related=also(spec, _TP),
        )


@rule(
    "T010",
    "Megatron-LM needs CUDA_DEVICE_MAX_CONNECTIONS=1",
    """Before compute capability 10, Megatron-LM overlaps tensor- and context-parallel communication with computation
    only when kernels start in the order of their launch: CUDA_DEVICE_MAX_CONNECTIONS=1, which it checks.""",
    wrong={"parallelism": {"tp": 2}},
    right={"parallelism": {"tp": 2}, "cluster": {"accelerator": "b200"}},
    severity=Severity.INFO,
    sources=("Megatron-LM arguments.py",),
    targets=("megatron",),
)
def megatron_needs_one_connection(spec: Resolution) -> Iterator[Finding]:
    """Says what has to be exported before Megatron-LM starts."""
    tp, cp, accelerator = spec.axis(Axis.TP), spec.axis(Axis.CP), spec.cluster.accelerator
    machine = accelerators().get(accelerator)  # none, where a file that cannot be used is named
    if (tp > 1 or cp > 1) and machine is not None and machine.starts_kernels_in_turn:
        yield Finding(
            f"tp {tp}, cp {cp} on {accelerator}: export CUDA_DEVICE_MAX_CONNECTIONS=1 for Megatron-LM",
            _TP if tp > 1 else ("parallelism", "cp"),
        )


@rule(
    "T007",
    "the sequence does not divide over tp",
    """With sequence parallelism each tensor-parallel rank keeps an equal share of the tokens of its context-parallel
    rank. Where (sequence_length / cp) % tp is not 0 the runtime continues them with padding between the blocks, which
    changes no number and costs the padding's time and memory. Megatron-LM and torchtitan refuse such a length, and get
    no files. Together with zigzag chunks, a length without padding is a multiple of cp · lcm(2, tp).""",
    wrong={"parallelism": {"tp": 8, "sequence_parallel": True}, "training": {"sequence_length": 8188}},
    right={"parallelism": {"tp": 8, "sequence_parallel": True}, "training": {"sequence_length": 8184}},
    severity=Severity.WARNING,
    sources=("Megatron-Core tensor_parallel/mappings.py", "torchtitan#1306"),
)
def sequence_divides_over_tp(spec: Resolution) -> Iterator[Finding]:
    """Fires when the local sequence cannot be split over tp."""
    length, cp, tp = spec.sequence_length, spec.axis(Axis.CP), spec.axis(Axis.TP)
    if spec.sequence_parallel and length % cp == 0 and (length // cp) % tp:
        local = length // cp
        yield length_finding(
            spec,
            f"(sequence_length {length} / cp {cp}) % tp {tp} = {local % tp}: with sequence_parallel the ranks hold "
            f"{-(-local // tp)} tokens each, {-local % tp} of them padding",
            also(spec, ("parallelism", "tp"), ("parallelism", "sequence_parallel")),
        )

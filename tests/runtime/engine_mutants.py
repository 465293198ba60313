"""An adapter for `prove` of the engine that `PROVE_ENGINE` names, with a mistake planted in that engine as a feature.

A mistake replaces a function of the engine, or changes what the adapter has built. `.ci/prover_matrix.py` runs them.
"""

import importlib
import os
import sys

import torch

ENGINE = os.environ["PROVE_ENGINE"]
adapter = importlib.import_module(f"prove_ranks.engines.{ENGINE}_engine")
PACKAGES, step, save, full_parameters = adapter.PACKAGES, adapter.step, adapter.save, adapter.full_parameters
shims = getattr(adapter, "shims", lambda cell: ())


def supports(cell):
    _, needs = MUTANTS.get(cell["mutant"], (None, {}))
    missing = [name for name, value in needs.items() if cell[name] != value]
    return f"the mutant needs {missing[0]} {needs[missing[0]]}" if missing else adapter.supports(cell)


def build(model, cell):
    return planted(cell, lambda: adapter.build(model, cell))


def load(model, folder, cell):
    return planted(cell, lambda: adapter.load(model, folder, cell))


def planted(cell, built):
    plant, _ = MUTANTS.get(cell["mutant"], (None, {}))
    changes = plant() if plant else None  # in the engine's own functions
    run = built()
    if changes:
        changes(run)
    return run


def last_micro_batch():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Optimizer

    def forget(self, parameter):
        if not self.is_gradient_accumulation_boundary():
            self.clear_grad_attribute(parameter)

    Optimizer.async_accumulate_grad_in_cpu_via_gpu = forget


def own_norm():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    def norm(self, parameters):
        own = [self.norm_for_param_grads[number] for number in map(self.get_param_id, parameters)]
        return torch.stack(own).norm().float()

    DeepSpeedZeroOptimizer.complete_grad_norm_calculation_for_cpu_offload = norm


def not_clipped():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    DeepSpeedZeroOptimizer.unscale_and_clip_grads = lambda self, gradients, norm: None


def inputs_apart():
    from deepspeed.module_inject.layers import ColumnParallel

    ColumnParallel.backward = staticmethod(lambda ctx, gradient: (None, gradient))


def outputs_apart():
    from deepspeed.module_inject import layers

    layers.RowParallel.forward = staticmethod(lambda ctx, group, given, inference: given.clone())


def instruction(name):
    def plant():
        from deepspeed.runtime.pipe import engine, schedule

        engine.PipelineEngine._INSTRUCTION_MAP[getattr(schedule, name)] = lambda self, **_: None

    return plant


def sequence_ranks():
    return lambda run: setattr(run.engine.optimizer, "sequence_parallel_size", 1)


def off_by_one():
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF as Ulysses

    right = Ulysses._partition_global_sequence
    Ulysses._partition_global_sequence = lambda self, given: right(self, given).roll(1, 0)


def halved_tokens():
    from deepspeed.module_inject.auto_ep_layer import _AllToAllV

    right = _AllToAllV.backward
    _AllToAllV.backward = staticmethod(lambda ctx, gradient: right(ctx, gradient * 0.5))


def halved_experts():
    def change(run):
        for name, parameter in run.engine.module.named_parameters():
            if ".experts.w2" in name:
                parameter.register_hook(lambda gradient: gradient * 0.5)

    return change


def tokens_stay():
    from deepspeed.moe.sharded_moe import _AllToAll

    _AllToAll.backward = staticmethod(lambda ctx, gradient: (None, gradient))


def fixed_gates():
    from deepspeed.moe import sharded_moe

    right = sharded_moe.top2gating
    sharded_moe.top2gating = lambda logits, *given, **named: right(logits.detach(), *given, **named)


def norms_apart():
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    ReplicatedWithGradAllReduce.install_forward = lambda self, module, mesh: None


def sums_apart():
    from transformers.distributed.tensor_parallel import RowwiseParallel

    RowwiseParallel.transform_output_post_forward = lambda self, module, output, mesh: output.to_local()


def fixed_routes():
    from transformers.distributed.expert_parallel import AllToAllEP

    right = AllToAllEP.__call__
    AllToAllEP.__call__ = lambda self, hidden, index, weights: right(self, hidden, index, weights.detach())


def in_order_of_experts():
    from transformers.distributed.expert_parallel import AllToAllEP

    right = AllToAllEP._combine_tokens
    AllToAllEP._combine_tokens = lambda self, output, state: right(
        self, output, state._replace(order=state.order.sort().values)
    )


def first_chunk():
    right = adapter.finalize_model_grads

    def finalize(chunks, *given, **named):
        for chunk in chunks[1:]:
            chunk.finish_grad_sync = lambda **_: None
        return right(chunks, *given, **named)

    adapter.finalize_model_grads = finalize


def embeddings_apart():
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    module._allreduce_word_embedding_grads = lambda *_: None


TENSOR_PARALLEL = {
    "tp: gradients of q and k norms are not reduced": (norms_apart, {"tp": 2, "family": "qwen3"}),
    "tp: outputs of split layers are not summed": (sums_apart, {"tp": 2}),
}
MUTANTS = {
    "deepspeed": {
        "offload: the last micro-batch alone": (last_micro_batch, {"offload": True, "accumulation": 2, "stage": 2}),
        "offload: the norm of a rank's own shard": (own_norm, {"offload": True, "dp": 2, "stage": 1}),
        "offload: shards are not clipped": (not_clipped, {"offload": True, "clipping": 0.5, "stage": 1}),
        "AutoTP: the gradient of what split layers are given is not reduced": (inputs_apart, {"tp": 2}),
        "AutoTP: outputs of split layers are not summed": (outputs_apart, {"tp": 2}),
        "PipelineEngine: gradients of the tied embedding are not reduced": (
            instruction("ReduceTiedGrads"),
            {"pp": 2, "tied": True},
        ),
        "PipelineEngine: gradients are not reduced": (
            instruction("ReduceGrads"),
            {"pp": 2, "dp": 2, "stage": 0, "dtype": "fp32", "clipping": 0.0},  # clipped it is red without a mistake
        ),
        "Ulysses: ranks of the sequence count as data ranks": (sequence_ranks, {"cp": 2, "stage": 1}),
        "Ulysses: positions behind attention are off by one": (off_by_one, {"cp": 2}),
        "AutoEP: gradients of exchanged tokens x 0.5": (halved_tokens, {"experts": "autoep"}),
        "AutoEP: gradients of a weight of experts x 0.5": (halved_experts, {"experts": "autoep"}),
        "deepspeed.moe: gradients of tokens stay on their rank": (tokens_stay, {"experts": "moe"}),
        "deepspeed.moe: gates have no gradient": (fixed_gates, {"experts": "moe"}),
    },
    "transformers": {
        **TENSOR_PARALLEL,
        "ep: routers have no gradient": (fixed_routes, {"ep": 2}),
        "ep: outputs come back in the order of the experts": (in_order_of_experts, {"ep": 2}),
    },
    "accelerate": TENSOR_PARALLEL,
    "megatron": {
        "vpp: gradients of the first chunk alone are reduced": (first_chunk, {"vpp": 2, "dp": 2}),
        "vpp: gradients of the tied embedding are not reduced": (embeddings_apart, {"vpp": 2, "tied": True}),
    },
}[ENGINE]
FEATURES = {**adapter.FEATURES, "mutant": ("none", *MUTANTS)}

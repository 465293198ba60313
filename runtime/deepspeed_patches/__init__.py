"""Every place where the runtime changes DeepSpeed, or relies on names of it that are not documented.

Read off DeepSpeed 0.19.8, the version that the tests run with. Whoever moves to another version goes through these
lists; `probe` looks for the names before an engine is made.

Changed:

- `comm.torch.build_shm_op` (comm/torch.py): the CPU accelerator would compile an operator at start-up.
  `forbid_jit_builds`
- `comm.comm.cdb`, `utils.groups.mpu`, `utils.groups._WORLD_GROUP` and the tables of expert groups (module globals):
  they outlive the process groups that they are of. `forget_groups`
- The tables of expert groups in utils/groups.py, which DeepSpeed's own MoE layers fill: the plan's groups are put into
  them. `register_expert_groups`
- A module of the class `deepspeed.moe.layer.MoE` in a model, by which the engine knows that parameters may be experts
  (`has_moe_layers`, runtime/engine.py): there is one while the engine is made. `with_expert_layers`
- `has_moe_layers` of an engine is False while it saves and loads: DeepSpeed would write each expert to a file of its
  own naming (`_save_moe_checkpoint`). `use_checkpoint_engine`
- `optimizer.scaled_global_norm` (runtime/zero/stage_1_and_2.py): ZeRO computes one norm for each group of parameters
  over tp and pp, of which a stage without experts has fewer. `norm_at_once`
- `deepspeed.initialize`, while Hugging Face's Trainer runs: accelerate passes no mpu. `initialize_with`
- `_do_optimizer_sanity_check` and `_configure_fp16_optimizer` of `DeepSpeedEngine` (runtime/engine.py) while an engine
  of ZeRO stage 0 is made: its optimizer is one of ours, on the base class `ZeROOptimizer` (runtime/base_optimizer.py),
  with loss scalers of DeepSpeed; then `clip_fp32_gradients` and `zero_grad` of the engine, which know nothing of it.
  The engine sums what `get_grads_for_reduction` gives. `with_optimizer`, `engine.unsharded`
- `_do_optimizer_sanity_check` again at other stages: bf16 weights with sums in fp32 get the optimizer that fp16 weights
  get (runtime/zero/stage_1_and_2.py), not `BF16_Optimizer`. `without_bf16_optimizer`
- `state_dict` of that optimizer while the engine saves, which would put it into the file of weights.
  `use_checkpoint_engine`
- `optimizer._fill_param_grad_accum_attribute` (runtime/zero/stage_1_and_2.py), which makes an fp32 copy of each
  gradient that it adds to an fp32 sum. `add_in_place`
- `optimizer.get_grad_norm_direct` (runtime/zero/stage_1_and_2.py): it counts a parameter wholly or not at all, and of a
  weight that ranks share in part only some rows count. Padding among the gradients is known by `_zero_padding`.
  `count_in_norm`
- The `step` of an engine is wrapped to time optimizer steps. `profiling.recorder`
- `allreduce_gradients` of an engine, which reduces at the end of a step: partial gradients are summed over tp first.
  `before_reduction`
- `global_steps`, `global_samples` and `skipped_steps` of an engine, and its optimizer's `loss_scaler`, are set when
  a checkpoint of another layout is loaded. `checkpoint.adapting`
- `reduce_ready_partitions_and_remove_grads` of an optimizer (runtime/zero/stage_1_and_2.py) with `overlap_comm`, which
  reduces each gradient as it comes: partial ones wait until they are summed over tp. `keep_until_end`
- `enable_backward_allreduce` and `micro_steps` of an engine, `overlap_comm` of its optimizer: the stages of a pipeline
  reduce gradients once, after all backward passes of a step, one micro-step to the engine. `reduce_at_end`
- `train_batch_size` and `gradient_accumulation_steps` of an engine's `_config`, `gradient_accumulation_steps` of its
  optimizer (runtime/zero/stage_1_and_2.py, stage3.py) and `micro_steps`, while the batch grows: its own
  `set_train_batch_size` divides by dp · cp. `set_batch`
- The `forward`, `backward` and `step` of an engine in pipeline stages refuse to be called by users.
  `pipeline`
- The accelerator gives way to one without memory. `preflight.stand_in`
- `checkpoint_engine` of an engine (runtime/checkpoint_engine/checkpoint_engine.py): all that `save_checkpoint` and
  `load_checkpoint` write and open goes through it, in runtime/engine.py and runtime/state_dict_factory.py; DeepSpeed's
  own unpickles any code. `_copy_recovery_script` writes beside it, and is left out. `load_universal_checkpoint`, true
  with the key "load_universal", would look for another form. `use_checkpoint_engine`, `checkpoint.deepspeed_engine`
- Weights are sharded over the plan's groups before DeepSpeed does it, which knows dp alone (`zero.Init` and its
  `_convert_to_zero_parameters`, runtime/zero/partition_parameters.py); then it leaves them as they are. `shard_weights`
- `__avg_scatter_grads` of the optimizer of stage 3 (runtime/zero/stage3.py): with reduce-scatter gradients are divided
  by dp · cp, and have to be by dp. `_grad_norm_counts_every_rank`: experts count on each rank of tp where DeepSpeed's
  ep is not over tp. `take_over_shards`
- `assert_ints_same_as_other_ranks` (runtime/zero/partitioned_param_coordinator.py, stage3.py, partition_parameters.py)
  compares the order of modules over the world, and here over the ranks that share weights. `take_over_shards`
- `apply_to_tensors_only` (runtime/zero/utils.py, parameter_offload.py), by which hooks of stage 3 reach what modules
  give: logits that are left to the loss pass by it. `shard_weights`
- The `step` of optimizers on the host (`cpu_offload`, `offload_optimizer`) and at stage 3: behind it the gradients of
  their masters and `grad_partitions_flat_buffer` are cleared, which DeepSpeed uses again where a step brings none.
  `take_over_gradients`
- `async_accumulate_grad_in_cpu_via_gpu` (runtime/zero/stage_1_and_2.py), which adds up whole parameters of which this
  rank has a part, with `temp_grad_buffer_for_cpu_offload` and `temp_grad_buffer_for_gpu_offload`; between
  `_wait_for_offload_copies` and `_record_offload_copy`; and `_use_compact_grad_partition_buffer`, which asks for fp32
  sums of the shard on the accelerator too. `take_over_gradients`
- `complete_grad_norm_calculation_for_cpu_offload` and the parts in `norm_for_param_grads` (runtime/zero/stage3.py and
  stage_1_and_2.py), in the place of `get_grad_norm_direct` on the host. `count_on_host`
- `load_state_dict` of the Adam in an optimizer of ZeRO, of torch or DeepSpeed (ops/adam/cpu_adam.py): it takes what the
  other has saved. `load_either_form`
- `defragment` (runtime/zero/stage3.py), which copies over the host, and the autocast that `runtime/zero/linear.py` asks
  for, while a rank has no values; and `torch.nn.functional.linear`, which DeepSpeed replaces for good. `without_values`

Read:

- `ds_id`, `ds_shape`, `ds_numel`, `ds_tensor` and `ds_process_group` of weights in shards, and the sub-groups of the
  optimizer of stage 3: `fp16_groups`, `fp32_partitioned_groups_flat`, `sub_group_to_group_id`. `optimizer_state`
- Groups of parameters, their flat tensors and shards: `bit16_groups`, `bit16_groups_flat` and
  `single_partition_of_fp32_groups` (runtime/zero/stage_1_and_2.py). Checkpoints of another layout are written into
  them, and preflight counts their bytes. `parameter_groups`, `flat_weights`, `master_shards`
- `grad_position` (runtime/zero/stage_1_and_2.py, stage3.py): where a gradient lies on the host. `gradient_on_host`
- `parameter._hp_mapping` (utils/mixed_precision_linkage.py): which elements of a parameter lie in this rank's shard.
  `place_in_shard`
- `installed_ops` (git_version_info.py) and `CPUAdamBuilder` (ops/op_builder), with torch's folder of extensions:
  whether DeepSpeedCPUAdam is compiled. `cpu_adam`
- `parameter.grad_accum`, `all_grad_tensors` and `averaged_gradients` (of stage 2),
  `ipg_buckets`, `round_robin_bit16_meta`: preflight counts the bytes of gradients and buckets. `kept_gradients`,
  `reduce_buckets`, `shape_tensors`

- `use_grad_accum_attribute` (runtime/zero/stage_1_and_2.py): where gradients add up, to which those of another stage
  are added. `accumulated_gradient`

Agreed on with DeepSpeed by name, in the module that the name belongs to:

- `parameter.tensor_model_parallel` (`is_model_parallel_parameter`, runtime/utils.py): whether a parameter counts in the
  gradient norm of tensor-parallel ranks other than the first. `tensor_parallel.partial`
- `parameter.allreduce` and `parameter.group_name` (`is_moe_param`, moe/utils.py): experts that other ranks do not hold,
  and the groups that share them. Groups of parameters say so with "moe" and "name". `mark_expert`
- `parameter.ds_zero_placement_family` and `ds_zero_partition_group_name` (runtime/zero/stage3.py): experts as those of
  AutoEP are. `mark_sharded_experts`
- `parameter.ds_pipe_replicated` (runtime/zero/stage_1_and_2.py): a weight that another stage
  counts in the gradient norm. `count_on_another_stage`
- The methods of an mpu (utils/groups.py, runtime/engine.py). `groups`
- Names, keys and pickled classes of checkpoint files: they are read and written without an engine.
  `checkpoint.state_file`, `checkpoint.writing`, `checkpoint.reading`
- `universal_checkpoint_info` with its affine maps (checkpoint/affine_ir_spec.md): how a parameter is cut, for
  `ds_to_universal`. `checkpoint.manifest`
- The environment variable `LOCAL_RANK` (runtime/engine.py): the engine asks for it without a launcher too.
  `groups.rendezvous`
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import FunctionType
from typing import Any

from parcompile.runtime.errors import everywhere
from parcompile.user_files import shipped

VERSIONS = "deepspeed>=0.19.8,<0.20"

NAMES: Mapping[str, Sequence[str]] = shipped("parcompile.runtime.deepspeed_patches", "names.json")
"""By module or class of DeepSpeed. What is an instance's is found among the names that the methods use."""


def check_names() -> None:
    """Refuse a DeepSpeed that lacks any of them.

    Raises:
        RunError: with the names, on every rank: all have one version.
    """
    if names := missing():
        from deepspeed import __version__

        message = f"DeepSpeed {__version__} has no {', '.join(names)}, on which the runtime relies"
        raise everywhere(f'{message}: install "{VERSIONS}"')


def missing() -> list[str]:
    """The names that are not there, as `module.name`."""
    return [f"{place}.{name}" for place, names in NAMES.items() for name in _without(f"deepspeed.{place}", names)]


def _without(place: str, names: Sequence[str]) -> list[str]:
    try:
        found = _load(place)
    except (ImportError, AttributeError):
        return list(names)
    used = _used(found) if isinstance(found, type) else set()
    return [name for name in names if not hasattr(found, name) and name not in used]


def _load(place: str) -> Any:
    module, _, last = place.rpartition(".")
    return getattr(import_module(module), last) if last[0].isupper() else import_module(place)


def _used(of: type) -> set[str]:
    """Attributes and texts in the methods of a class."""
    codes = [one.__code__ for one in vars(of).values() if isinstance(one, FunctionType)]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found |= {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
        codes += [one for one in code.co_consts if hasattr(one, "co_names")]
    return found

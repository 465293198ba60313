"""What functions of Megatron-Core compute, beside their definitions."""

import inspect
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from common import group_of_one, say
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils, router

case = sys.argv[1]
group_of_one()
dist.init_process_group("gloo")
ranks = dist.get_world_size()
parallel_state.initialize_model_parallel(
    **{f"{'pipeline' if case == 'layers' else 'tensor'}_model_parallel_size": ranks}
)
torch.manual_seed(0)
torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron names a GPU where it draws tensors


def config_of(**keys: Any) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True,
             "add_bias_linear": False}  # fmt: skip
    return (MLATransformerConfig if case == "mla" else TransformerConfig)(**{**sizes, **keys})


def layer_spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(multi_latent_attention=case == "mla", normalization="RMSNorm")


def gate_of(config: Any) -> Any:
    keys = inspect.signature(router.TopKRouter.__init__).parameters
    defaults = {"model_comm_pgs": "get_default_model_comm_pgs", "pg_collection": "get_default_pg_collection"}
    return router.TopKRouter(config, **{key: getattr(moe_utils, defaults[key])() for key in defaults if key in keys})


if case == "groups":  # one expert of each of two groups: a group counts by its best score, as DeepSeek-V2 chooses
    scores = torch.tensor([[0.40, 0.0, 0.12, 0.11, 0.20, 0.0]])
    chosen, _ = moe_utils.group_limited_topk(scores, topk=2, num_tokens=1, num_experts=6, num_groups=3, group_topk=2)
    say("sum of the chosen scores", chosen.sum(), 0.6)
elif case == "sigmoid":  # scores of the balancing loss of logits in bf16, which routing computes in fp32
    logits = torch.randn(64, 8, dtype=torch.bfloat16)
    _, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")
    right = logits.float().sigmoid()
    right = right / right.sum(-1, keepdim=True)
    say("scores", 1 + float((scores.float() - right).abs().max() / right.max()), 1.0, 1e-4)
elif case in ("counts", "sum"):  # the balancing loss with a bias that sends tokens elsewhere; summed over 16 tokens
    further: dict[str, Any] = {"calculate_per_token_loss": case == "sum"}
    if case == "counts":
        further |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    further |= {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "aux_loss"}
    gate = gate_of(config_of(num_moe_experts=4, moe_router_topk=2, **further))
    if case == "counts":
        gate.expert_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    logits = torch.randn(16, 4, requires_grad=True)
    gate.aux_loss_load_balancing(logits)[0].mul(0.0).sum().backward()
    own = logits.detach().clone().requires_grad_()
    scores = own.sigmoid() / own.sigmoid().sum(-1, keepdim=True) if case == "counts" else own.softmax(-1)
    share = torch.zeros(16, 4).scatter(1, scores.topk(2).indices, 0.5).mean(0)
    (4 * (scores.mean(0) * share).sum() * (16 if case == "sum" else 1)).backward()
    assert logits.grad is not None and own.grad is not None
    say("gradient of the logits", 1 + float((logits.grad - own.grad).norm() / own.grad.norm()), 1.0)
elif case == "contexts":  # the balancing loss of two context-parallel ranks, scaled as the loss: by 2 / 4 micro-batches
    from megatron.core.pipeline_parallel import schedules

    config = config_of(num_moe_experts=4, moe_router_topk=2)
    loss = torch.ones(())
    schedules.forward_step_calc_loss(
        torch.nn.Identity(), loss, lambda output: (output, {}), config, None, False, 4, [], 2, True
    )
    say("scale", moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale, loss)
elif case == "tokens":  # the z-loss of tokens that tp ranks share, which is divided by the tokens of all of them
    config = config_of(
        num_moe_experts=4, moe_router_topk=2, moe_z_loss_coeff=1.0, calculate_per_token_loss=True,
        tensor_model_parallel_size=ranks, sequence_parallel=True, moe_router_load_balancing_type="none",
    )  # fmt: skip
    logits = torch.randn(8, 4, requires_grad=True)
    gate_of(config).apply_z_loss(logits).mul(0.0).sum().backward()
    own = logits.detach().clone().requires_grad_()
    own.logsumexp(-1).square().sum().backward()
    assert logits.grad is not None and own.grad is not None
    say("gradient of the logits", logits.grad.norm(), own.grad.norm())
elif case == "mla":  # YaRN with mscale 1 and mscale_all_dim 0.5, as its definition and the released models have it
    from megatron.core.transformer.spec_utils import build_module

    config = config_of(rotary_scaling_factor=40.0, mscale=1.0, mscale_all_dim=0.5, multi_latent_attention=True)
    spec = layer_spec().submodules.self_attention
    spec.submodules.core_attention = torch.nn.Identity  # the local one takes no MLA; the scale is decided outside
    attention = build_module(spec, config=config, layer_number=1)
    scale = 0.1 * 0.5 * math.log(40.0) + 1.0
    say("scale of the scores", attention.softmax_scale, scale * scale / math.sqrt(attention.q_head_dim))
else:  # the second of two stages, whose first layer is the third of the model: its scores are divided by 3 and 3
    from megatron.core.transformer.spec_utils import build_module

    config = config_of(
        pipeline_model_parallel_size=ranks, apply_query_key_layer_scaling=True, pipeline_dtype=torch.float32
    )
    layer = build_module(layer_spec(), config=config, layer_number=1)
    scales = [0.0] * ranks
    dist.all_gather_object(scales, layer.self_attention.core_attention.softmax_scale)
    say("scale of the scores", scales[-1], 1 / math.sqrt(8) / 3)

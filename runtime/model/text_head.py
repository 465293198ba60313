"""A causal language model around a text model that transformers builds inside a multimodal model only.

Names are those of any causal language model (`model.`, `lm_head.`); logits are those of the multimodal model.

Source: the `ForConditionalGeneration` classes of transformers 5.23.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.model.family import by_type, types_with
from parcompile.spec import Precision

TEXT_MODELS: Mapping[str, str] = by_type("text_model")
"""Model types of text parts, and their classes, for which transformers 5.23 has no class with a head of its own."""
_NEVER_TIED = types_with("never_tied")
"""Those whose multimodal class ties no weights."""

_MASKS = "create_masks_for_generate"
"""The method with which some classes make masks for generation."""


@functools.cache
def with_head(model_type: str) -> Any:
    """The class of the text model of a type with a head, a `PreTrainedModel` as `AutoModelForCausalLM` finds them."""
    import transformers

    text = getattr(transformers, TEXT_MODELS[model_type])
    own: dict[str, Any] = {
        "__module__": text.__module__,
        "__init__": functools.partialmethod(_build, text),
        "__annotations__": {"config": text.config_class},
        "config_class": text.config_class,
        "_tied_weights_keys": None if model_type in _NEVER_TIED else {"lm_head.weight": "model.embed_tokens.weight"},
        "_tp_plan": {} if model_type in _NEVER_TIED else {"lm_head": "colwise_gather_output"},
        "forward": transformers.utils.can_return_tuple(_forward),
    }
    whole = getattr(transformers, text.__name__.removesuffix("TextModel") + "ForConditionalGeneration")
    if _MASKS in vars(whole):
        own[_MASKS] = vars(whole)[_MASKS]
    pretrained = text.__mro__[1]
    name = text.__name__.removesuffix("Model") + "ForCausalLM"
    return type(name, (pretrained, transformers.GenerationMixin), own)


def _build(self: Any, text: Any, config: Any) -> None:
    super(type(self), self).__init__(config)
    self.model = text(config)
    self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    self.post_init()


def _forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    output_router_logits: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Tokens [B, S] to logits [B, S, V], and the loss of labels [B, S], with that of experts where it is asked for."""
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
    from transformers.modeling_utils import slice_logits_to_keep

    balanced = output_router_logits
    if balanced is None:
        balanced = getattr(self.config, "output_router_logits", False)
    # DeepSeek-OCR 2 has no such loss.
    count: Any = getattr(sys.modules[type(self).__module__], "load_balancing_loss_func", None)
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **({"output_router_logits": True} if balanced and count else {}),
        **kwargs,
    )
    logits = _scaled(self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)), self.config)
    loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    found = {"logits": logits, "past_key_values": outputs.past_key_values}
    found |= {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
    if not (balanced and count):
        return CausalLMOutputWithPast(loss=loss, **found)
    sizes = self.config.num_local_experts, self.config.num_experts_per_tok
    balance = count(outputs.router_logits, *sizes, attention_mask)
    if loss is not None:
        loss = loss + self.config.router_aux_loss_coef * balance
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=balance, router_logits=outputs.router_logits, **found)


def _scaled(logits: Tensor, config: Any) -> Tensor:
    """With `output_multiplier` m and `final_logit_softcapping` c: c · tanh(m · logits / c)."""
    if not hasattr(config, "output_multiplier"):
        return logits
    cap = config.final_logit_softcapping
    scaled: Tensor = torch.tanh(logits * config.output_multiplier / cap) * cap
    return scaled


TORCH_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


UNLISTED: Mapping[str, str] = by_type("unlisted_class")
"""Model types whose class `AutoModelForCausalLM` does not find. Transformers 5.23 lists Mistral 4's with the models of
images and text, of which it is the text part."""


def model_class(config: Any, labels: int = 0) -> Any:
    """The class for language modelling with a configuration, or with those of a class; with `labels` a classifier."""
    import transformers

    if labels:
        return transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    if config.model_type in TEXT_MODELS:
        return with_head(config.model_type)
    if config.model_type in UNLISTED:
        return getattr(transformers, UNLISTED[config.model_type])
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config if isinstance(config, type) else type(config)]


def causal_model(config: Any, labels: int = 0, **options: Any) -> Any:
    """The model of a configuration with weights that are drawn, as `AutoModelForCausalLM.from_config` gives it.

    With `labels`, the classifier of `AutoModelForSequenceClassification`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if labels:
        config.num_labels = labels
        return AutoModelForSequenceClassification.from_config(config, **options)
    if config.model_type in TEXT_MODELS:
        return with_head(config.model_type)._from_config(config, **options)
    listed = AutoModelForImageTextToText if config.model_type in UNLISTED else AutoModelForCausalLM
    return listed.from_config(config, **options)

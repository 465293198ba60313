"""The list of model types is that of the installed transformers."""

from __future__ import annotations

from parcompile.model.catalogue import model_types, transformers_version
from parcompile.runtime.model.text_head import TEXT_MODELS, UNLISTED


def test_the_list_has_every_type_that_transformers_builds() -> None:
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    assert transformers_version() == transformers.__version__, "python .ci/generate/model_types.py"
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    multimodal = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    known = {name for name in causal | multimodal if name in CONFIG_MAPPING}
    assert model_types().keys() == known | TEXT_MODELS.keys(), "python .ci/generate/model_types.py"
    assert {name for name, one in model_types().items() if one.causal} == (
        known & (causal | UNLISTED.keys())
    ) | TEXT_MODELS.keys()

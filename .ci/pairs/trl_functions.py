"""What functions of trl compute, beside their definitions: divergence | batchmean | end."""

import sys

import torch
from common import say

case = sys.argv[1]
torch.manual_seed(0)
if case == "end":
    import tempfile

    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    inner = Tokenizer(models.WordLevel({"[END]": 0, "a": 1, "b": 2}, unk_token="[END]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[END]", eos_token="[END]")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            LlamaForCausalLM(LlamaConfig(vocab_size=3, **sizes)),
            SFTConfig(output_dir=folder, use_cpu=True, report_to=[]),
            train_dataset=Dataset.from_list([{"text": "a b [END]"}] * 2), processing_class=tokenizer,
        )  # fmt: skip
        labels = next(iter(trainer.get_train_dataloader()))["labels"]
    say("rows whose end is trained", (labels == 0).any(-1).sum(), 2.0)
else:
    try:
        from trl import GKDTrainer
    except ImportError:
        from trl.experimental.gkd import GKDTrainer
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    beta = 0.2
    reduction = "sum" if case == "divergence" else "batchmean"
    loss = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction=reduction)
    p, q = teacher.softmax(-1), student.softmax(-1)
    mixture = beta * p + (1 - beta) * q
    right = beta * (p * (p / mixture).log()).sum(-1) + (1 - beta) * (q * (q / mixture).log()).sum(-1)
    say("divergence", loss, right.sum() / (1 if case == "divergence" else len(student)))

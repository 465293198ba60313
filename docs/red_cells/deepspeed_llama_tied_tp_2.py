"""deepspeed 0.19.8 ends with an error: llama tied tp 2.

AutoTP splits the embedding that the head shares, by vocabulary, and no loss is computed over such a part.

    torchrun --nproc_per_node 2 FILE              # ends with an error
    torchrun --nproc_per_node 2 FILE --without    # an untied head: a loss
"""
import os, sys
os.environ |= {"DS_ACCELERATOR": "cpu"}
import deepspeed, torch, transformers
deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)  # compiles nothing
deepspeed.init_distributed("gloo")

keys = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=None, tie_word_embeddings="--without" not in sys.argv)
model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**keys))
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config={
    "train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False})
ids = torch.arange(96, 128)[None]
logits = engine(input_ids=ids).logits
print("logits", tuple(logits.shape), "of", tuple(ids.shape), "tokens, vocabulary", 128, flush=True)
print("loss", float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())), flush=True)

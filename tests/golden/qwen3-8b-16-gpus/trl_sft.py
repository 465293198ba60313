# Written for trl 1.16.0
# plan "qwen3-8b, more tp than kv heads", 16 ranks
# parcompile 0.1.0, spec sha256:33d035573ed2fdd319541faa03f59f9627d220c9728683e863803d44a7886786
"""Supervised fine-tuning by trl under the plan beside this file.

    bash launch/torchrun.sh trl_sft.py --model FOLDER --data FILE.jsonl

Each line of the file has a text, messages, or a prompt and its completion, as trl's SFTTrainer reads them. Batch,
precision, optimizer, clipping, seed and layout are the plan's. DPOTrainer and others take the same line.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from parcompile.runtime.trainer import parallelise

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", default="runs")
given = parser.parse_args()

SFTTrainer = parallelise(SFTTrainer, Path(__file__).resolve().parent)
trainer = SFTTrainer(
    model=given.model,
    args=SFTConfig(given.output, max_length=32768, logging_steps=1, lr_scheduler_type='constant', bf16=True, report_to=[]),
    train_dataset=load_dataset("json", data_files=given.data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(given.model),
)
trainer.train()
trainer.save_model(given.output)

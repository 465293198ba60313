"""Files of trainers above transformers: their options are arguments of its Trainer under other names."""

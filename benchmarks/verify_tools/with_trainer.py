"""transformers' Trainer with a model of its own."""

import tempfile

from task import LENGTH, VOCABULARY, Tokens, arguments
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import dtrain.check


class Check(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more) -> None:
        dtrain.check.step(None, model)


options = arguments()
set_seed(0)
dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, **dropout)
)
training = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=options.steps,
    per_device_train_batch_size=options.batch // options.accumulate,
    gradient_accumulation_steps=options.accumulate, use_cpu=True, logging_steps=1, save_strategy="no", report_to=[],
    disable_tqdm=True, max_grad_norm=0.0,
)  # fmt: skip
Trainer(model=model, args=training, train_dataset=Tokens(options.uneven), callbacks=[Check()]).train()

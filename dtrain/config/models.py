"""Class paths of dtrain's models that rules and exports name, which must not import them."""

GPT2 = "dtrain.models.gpt2.GPT2"
LLAMA = "dtrain.models.llama.Llama"
LANGUAGE_MODELS = (GPT2, LLAMA)  # causal: they predict the next token

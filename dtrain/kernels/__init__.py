"""Operations that torch does in more passes over memory than it takes."""

# Logits at a time of head and loss (cross_entropy.py): 1 GiB in 16 bits. With half of it the product that gives x's
# gradient has too few tiles for an H200: 5.5 ms instead of 3.9 of gpt2-1.5b's at batch 16.
CHUNK_ELEMENTS = 2**29

"""Operations that torch does in more passes over memory than it takes."""

CHUNK_ELEMENTS = 2**28  # logits at a time of head and loss (cross_entropy.py): 512 MiB in 16 bits

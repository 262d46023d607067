"""Operations that torch does in more passes over memory than it takes."""

# Logits at a time of head and loss (cross_entropy.py): 1 GiB in 16 bits. With half of it the product that gives x's
# gradient has too few tiles for an H200: 5.5 ms instead of 3.9 of gpt2-1.5b's at batch 16.
CHUNK_ELEMENTS = 2**29
# Operations from which a product gets the fastest kernel there is (cublaslt.py): 30 µs of an H200. Below, a call from
# Python takes longer than the product.
LARGE_PRODUCT = 2e10


def chunk_rows(rows: int, vocabulary: int) -> int:
    """Rows of chunks of at most CHUNK_ELEMENTS logits, in whole tiles of 128. The planner asks, too.

    All of one size where up to a third more chunks give that: products are tuned for each size (cublaslt.py).
    """
    chunks = max(1, -(-rows * vocabulary // CHUNK_ELEMENTS))
    chunks = next((n for n in range(chunks, chunks * 4 // 3 + 1) if rows % (128 * n) == 0), chunks)
    return max(1, -(-rows // chunks // 128)) * 128

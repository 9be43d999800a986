"""Print the blocks of scores that splash attention runs on a TPU: python -m bench.attention

A block is needed if it holds at least one score that the mask leaves. `visited` counts the blocks that each of three
kernels visits: outputs, gradients of queries, gradients of keys and values. Nothing runs. Tests compare these counts
with the library's mask infos.
"""

from model.kernels import products, splash_block, visible_blocks

CASES = ((1280, 0), (2048, 0), (2048, 512), (8192, 0), (8192, 2048), (16384, 4096), (32768, 0), (32768, 8192))


def main() -> None:
    print(f"{'tokens':>7}{'window':>8}{'block':>7}{'needed':>8}{'visited':>9}{'products forward':>18}{'backward':>10}")
    for length, back in CASES:
        window, block = back or None, splash_block(length)
        forward, backward = (round(scores / block**2) for scores in products("splash", length, window))
        counts = f"{visible_blocks(length, window):8,}{forward // 2:9,}{forward:18,}{backward:10,}"
        print(f"{length:7,}{back or 'all':>8}{block:7}{counts}")


if __name__ == "__main__":
    main()

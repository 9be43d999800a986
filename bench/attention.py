"""Products with blocks of scores that splash attention runs on a TPU, over those that the mask needs: python -m
bench.attention

Needed are 2 products forward and 5 backward for each block of scores, of the kernel's own compute size, that holds at
least one score that the mask leaves. Nothing runs: tests hold these counts against the library's mask infos. `parts`
are the partial gradients of the queries that the backward kernel writes, in copies of the queries; 0: a second kernel
computes them.
"""

from model.kernels import products, splash_backward, splash_block, visible_blocks

CASES = ((1280, 0), (2048, 0), (2048, 512), (8192, 0), (8192, 2048), (16384, 4096), (32768, 0), (32768, 8192))


def main() -> None:
    print(
        f"{'tokens':>7}{'window':>8}{'block':>7}{'needed':>8}{'forward':>9}{'backward':>10}{'both':>7}{'keys':>7}{'parts':>7}"
    )
    for length, back in CASES:
        window, block = back or None, splash_block(length)
        needed = visible_blocks(length, window, block, block)
        run, backward = products("splash", length, window, 128), splash_backward(length, window, 128)
        forward, both = run.forward / (2 * needed * block**2), sum(run) / (7 * needed * block**2)
        gradients = run.backward / (5 * needed * block**2)
        parts = length // backward.keys if backward.fused else 0
        shape = f"{length:7,}{back or 'all':>8}{block:7}{needed:8,}"
        print(f"{shape}{forward:9.2f}{gradients:10.2f}{both:7.2f}{backward.keys:7,}{parts:7}")


if __name__ == "__main__":
    main()

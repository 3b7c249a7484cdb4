"""Draws figures/flash_attention.svg: the causal grid of tiles, and one row's online softmax as key tiles arrive.

    python flash_figure.py

The right half is computed with `kernels.softmax_step`, on seeded data. lessons/05_flash_attention.py tells the story.
Legend: i, j query and key tile; m running maximum (base 2), l running sum, acc running sum of values, o the output.
"""
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]  # common/

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"  # Okabe-Ito


def running_softmax(tiles=12, bS=16, K=64, seed=258):
    """One query over `tiles` tiles of random keys: m, l and ‖acc / l - o‖ / ‖o‖ after each tile, (tiles,) each.

    The seed is one whose maximum rises three times; the query is doubled, as scores of trained models spread wider.
    """
    from kernels import scale, softmax_step

    random = np.random.default_rng(seed)
    shapes = (1, K), (tiles, bS, K), (tiles, bS, K)
    q, k, v = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
    state = jnp.full((1, 1), jnp.finfo(jnp.float32).min), jnp.zeros((1, 1)), jnp.zeros((1, K))
    states = []
    for k_tile, v_tile in zip(k, v):
        state = softmax_step(2 * q @ k_tile.T * scale(K), v_tile, *state)
        states.append(state)
    m, l = (np.array([float(state[part][0, 0]) for state in states]) for part in (0, 1))
    partial = np.array([np.asarray(acc / l)[0] for _, l, acc in states])
    return m, l, np.linalg.norm(partial - partial[-1], axis=1) / np.linalg.norm(partial[-1])


def draw_grid(axes, n=6):
    """n x n tiles: whole, cut by the diagonal, skipped; the arrows are the order of the forward pass."""
    for i in range(n):
        for j in range(n):
            x, y, size = j + 0.05, i + 0.05, 0.9
            if j > i:
                axes.add_patch(rectangle(x, y, size, facecolor="white", edgecolor=GREY, linestyle=":"))
            else:
                axes.add_patch(rectangle(x, y, size, facecolor=BLUE, alpha=0.3))
            if i == j:
                axes.fill([x, x + size, x + size], [y, y, y + size], color=ORANGE, alpha=0.75, linewidth=0)
    arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
    starts, ends = [(0.3, i + 0.62) for i in range(n)], [(i + 0.45 if i else 0.3, i + 0.62) for i in range(n)]
    axes.plot(*zip(*starts), "o", markersize=2.5, color="black")
    for start, end in zip(starts[1:], ends[1:]):
        axes.annotate("", end, start, arrowprops=arrow)
    for end, start in zip(ends, starts[1:]):  # back to the first key tile
        axes.plot(*zip(end, start), color="black", linewidth=0.6, linestyle=":")
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=np.arange(n) + 0.5, yticks=np.arange(n) + 0.5,
             xticklabels=range(n), yticklabels=range(n), xlabel="key tile j", ylabel="query tile i")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def rectangle(x, y, size, **style):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), size, size, **{"edgecolor": "none", "linewidth": 0.8} | style)


def draw_flash(path):
    """Writes the figure to `path`: 6 inches wide, the same bytes for the same data."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "nanogpt", "font.size": 9})
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(6, 3.7), layout="constrained")
    cells = figure.add_gridspec(3, 2, width_ratios=(1.15, 1))
    grid = figure.add_subplot(cells[:, 0])
    draw_grid(grid)
    handles = [rectangle(0, 0, 1, facecolor=BLUE, alpha=0.3), rectangle(0, 0, 1, facecolor=ORANGE, alpha=0.75),
               rectangle(0, 0, 1, facecolor="white", edgecolor=GREY, linestyle=":")]
    grid.legend(handles, ["computed", "masked", "never visited"], loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3,
                frameon=False, handlelength=1.2, handleheight=1.2, columnspacing=1.2, handletextpad=0.5)

    m, l, error = running_softmax()
    at = np.arange(len(m))
    rises = at[1:][np.diff(m) > 0]
    panels = [figure.add_subplot(cells[row, 1]) for row in range(3)]
    for axes, values, colour, title in zip(panels, (m, l, error), (BLUE, ORANGE, GREEN), (
            "running maximum m", "running sum l", "‖acc / l − o‖ / ‖o‖")):
        for j in rises:
            axes.axvline(j, color=GREY, linewidth=0.8, linestyle=":")
        axes.plot(at, values, "o-", color=colour, markersize=3, linewidth=1.4, clip_on=False)
        axes.set_title(title, fontsize=9, color=colour, loc="left", pad=3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlim=(-0.5, len(m) - 0.5), xticks=at[::2], ylim=(0, 1.15 * values.max()))
        axes.tick_params(labelbottom=axes is panels[-1])
    panels[0].text(len(m) - 0.5, 0.3, "dotted: a larger maximum arrives,\nl and acc are scaled down", fontsize=7,
                   ha="right", va="bottom", color="#666666", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    panels[0].set_yticks(range(0, 7, 2))
    panels[-1].set_xlabel("key tile j, the last one seen")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw_flash(HERE / "figures" / "flash_attention.svg")

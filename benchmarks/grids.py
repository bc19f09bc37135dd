"""A heading and rows of cells, as aligned text and as Markdown. The first ``texts`` columns are text, the others numbers."""


def aligned(grid, texts) -> list[str]:
    """Numbers to the right, text to the left; the reason in a failed row, which has too few cells, runs on."""
    full = [row for row in grid if len(row) == len(grid[0])]
    widths = [max(len(row[i]) for row in (grid if i < texts else full)) for i in range(len(grid[0]))]

    def line(row):
        cells = enumerate(zip(row, widths, strict=False))
        return "  ".join(cell.ljust(width) if i < texts else cell.rjust(width) for i, (cell, width) in cells).rstrip()

    return [line(row) for row in grid]


def piped(grid, texts) -> str:
    columns = len(grid[0])
    rule = ["---" if i < texts else "---:" for i in range(columns)]
    rows = [grid[0], rule, *grid[1:]]
    return "\n".join("| " + " | ".join(row + [""] * (columns - len(row))) + " |" for row in rows)

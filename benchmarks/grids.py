"""Tables as aligned text and as Markdown: a heading, then rows of cells; the first ``texts`` columns are text, then numbers."""


def aligned(grid, texts) -> list[str]:
    """Lines with text to the left and numbers to the right. A failed row has too few cells: its reason runs on."""
    full = [row for row in grid if len(row) == len(grid[0])]
    widths = [max(len(row[i]) for row in (grid if i < texts else full)) for i in range(len(grid[0]))]

    def line(row):
        cells = enumerate(zip(row, widths, strict=False))
        return "  ".join(cell.ljust(width) if i < texts else cell.rjust(width) for i, (cell, width) in cells).rstrip()

    return [line(row) for row in grid]


def piped(grid, texts) -> str:
    """A Markdown table."""
    columns = len(grid[0])
    rule = ["---" if i < texts else "---:" for i in range(columns)]
    rows = [grid[0], rule, *grid[1:]]
    return "\n".join("| " + " | ".join(row + [""] * (columns - len(row))) + " |" for row in rows)

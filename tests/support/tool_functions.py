"""Functions and an MCP server that tests give an assistant as tools."""

import time


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


def fail() -> None:
    """Always fails."""
    raise RuntimeError("out of order")


def nap() -> None:
    """Takes too long."""
    time.sleep(0.5)


def novel() -> str:
    """Says too much."""
    return "x" * 100


if __name__ == "__main__":
    from mcp.server import MCPServer

    server = MCPServer("sums")
    server.add_tool(add)
    server.add_tool(fail)
    server.run()

"""What storage does to files: bytes change, sizes stay."""

from pathlib import Path


def flip_a_byte(path: Path) -> None:
    """Change one bit in the middle of a file, as a worn disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

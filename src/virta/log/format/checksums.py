"""CRC-8 and CRC-32C in plain Python; native/crc.h is the same in C (docs/format.md, Checksums)."""

from __future__ import annotations

from typing import Final

Buffer = bytes | bytearray | memoryview


def _crc8_table() -> bytes:
    table = bytearray(256)
    for i in range(256):
        c = i
        for _ in range(8):
            c = ((c << 1) ^ 0x31) & 0xFF if c & 0x80 else c << 1
        table[i] = c
    return bytes(table)


def _crc32c_table() -> list[int]:
    table = []
    for i in range(256):
        c = i
        for _ in range(8):
            c = (c >> 1) ^ 0x82F63B78 if c & 1 else c >> 1
        table.append(c)
    return table


_CRC8: Final = _crc8_table()
_CRC32C: Final = _crc32c_table()
_CRC32C_BACK: Final = {entry >> 24: index for index, entry in enumerate(_CRC32C)}


def crc8(data: Buffer, crc: int = 0) -> int:
    """CRC-8, polynomial 0x31, initial value 0, not reflected: check of b"123456789" is 0xA2."""
    table = _CRC8
    for byte in data:
        crc = table[crc ^ byte]
    return crc


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C (Castagnoli), continued from `crc`: check of b"123456789" is 0xE3069283."""
    table = _CRC32C
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc32c_seed(data: Buffer, crc: int) -> int:
    """Return the seed for which crc32c(data, seed) == crc: how a lost salt is found again."""
    crc ^= 0xFFFFFFFF
    for byte in reversed(bytes(data)):
        index = _CRC32C_BACK[crc >> 24]
        crc = ((crc ^ _CRC32C[index]) << 8 & 0xFFFFFFFF) | (index ^ byte)
    return crc ^ 0xFFFFFFFF

"""Documents out of one file: .txt, .jsonl, .jsonl.gz, .jsonl.zst and .parquet, read as a stream.

A .txt file is one document; in the other formats every line or row is one, its text in a named field.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from siamese_jax.errors import InputError

ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

_CHUNK_BYTES = 1 << 20
_LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes; the library's default refuses it
_BYTE_ORDER_MARK = "\ufeff"


def ending_of(path: Path, endings: tuple[str, ...] = ENDINGS) -> str | None:
    """The known ending of a file name, or None."""
    return next((ending for ending in endings if path.name.lower().endswith(ending)), None)


def read_file(path: Path, field: str = "text", reached: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yields the documents of one file in file order.

    reached: told, now and then, how many bytes of the file (as it lies on the disk) have been read.

    Raises InputError, naming the file and the byte, line or row, for an ending that is not in ENDINGS, an
    unreadable, empty, truncated or damaged file, bytes that are not UTF-8, a line that is not a JSON object,
    and a field that is missing or not a string. Blank lines between JSON lines are skipped.
    """
    ending = ending_of(path)
    if ending is None:
        raise InputError(
            f"{path} has an unknown ending; known endings are {', '.join(ENDINGS)}: rename or convert it"
        )
    reached = reached or (lambda place: None)
    try:
        size = path.stat().st_size
        if size == 0:
            raise InputError(f"{path} is empty (0 bytes): remove it from the source or fill it")
        if ending == ".txt":
            yield _decode(path.read_bytes(), path).removeprefix(_BYTE_ORDER_MARK)
            reached(size)
            return
        read = _parquet_rows if ending == ".parquet" else _json_lines
        documents = read(path, ending, field, reached)
        found = False
        for text in documents:
            found = True
            yield text
        reached(size)
    except OSError as error:
        reason = error.strerror or _first_line(error)
        raise InputError(f"cannot read {path}: {reason}: check the file and its permissions") from error
    if not found:
        raise InputError(f"{path} holds no document: remove it from the source or fill it")


def _decode(raw: bytes, path: Path, offset: int = 0, line: int = 1) -> str:
    """The text of bytes that begin at this offset and line of the file."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place, line = offset + error.start, line + raw.count(b"\n", 0, error.start)
        raise InputError(
            f"{path}, line {line} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {place} (of the "
            "uncompressed text): convert the file to UTF-8"
        ) from error


def _json_lines(path: Path, ending: str, field: str, reached: Callable[[int], None]) -> Iterator[str]:
    offset = 0
    for number, raw in enumerate(_split_lines(_chunks(path, ending, reached)), start=1):
        line = _decode(raw, path, offset, number)
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        offset += len(raw) + 1
        if line.strip():
            yield _field_of(line, f"{path}, line {number}", field)


def _field_of(line: str, place: str, field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place} is not JSON ({error.msg} at character {error.pos + 1}): every line must be one JSON object"
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python takes
        raise InputError(f"{place} cannot be read as JSON ({error}): mend or remove the line") from error
    if not isinstance(record, dict):
        raise InputError(f'{place} is JSON but a {type(record).__name__}, not an object with a field "{field}"')
    if field not in record:
        raise InputError(
            f'{place} has no field "{field}"; its fields are {_names(record)}: name one of them as field'
        )
    text = record[field]
    if not isinstance(text, str):
        raise InputError(
            f'{place}: field "{field}" is a {type(text).__name__}, not a string: name a field with text'
        )
    try:
        text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no UTF-8 text can hold
    except UnicodeEncodeError as error:
        raise InputError(
            f'{place}: field "{field}" has a lone surrogate (\\u{ord(text[error.start]):04x}) '
            f"at character {error.start}, which is not text: mend the line"
        ) from error
    return text


def _names(fields) -> str:
    return ", ".join(f'"{name}"' for name in fields) or "(none)"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _chunks(path: Path, ending: str, reached: Callable[[int], None]) -> Iterator[bytes]:
    try:
        with open(path, "rb") as packed:
            file = gzip.GzipFile(fileobj=packed) if ending == ".jsonl.gz" else packed
            chunks = iter(lambda: file.read(_CHUNK_BYTES), b"")
            for chunk in _unpack_zstd(chunks) if ending == ".jsonl.zst" else chunks:
                yield chunk
                reached(packed.tell())
    except EOFError as error:
        raise InputError(
            f"{path} is truncated: its compressed data end early: fetch or write the file again"
        ) from error
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise InputError(
            f"{path} is damaged or not {ending.rpartition('.')[2]} data ({error}): fetch or write the file again"
        ) from error


def _unpack_zstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Frame by frame: zstandard's own stream reader takes a truncated frame for the end of the file."""
    frame = None
    for packed in chunks:
        while packed:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            yield frame.decompress(packed)
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("unfinished zstd frame")


def _parquet_rows(path: Path, ending: str, field: str, reached: Callable[[int], None]) -> Iterator[str]:
    del ending
    import pyarrow  # here: it takes longer to import than all the rest of this package
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_column(table.schema_arrow, path, field)
            row, size, num_rows = 0, path.stat().st_size, table.metadata.num_rows
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for scalar in batch.column(0):
                    yield _row_text(scalar, path, row, field)
                    row += 1
                reached(size * row // num_rows)
    except pyarrow.ArrowInvalid as error:
        raise InputError(
            f"{path} is damaged or not parquet ({_first_line(error)}): fetch or write the file again"
        ) from error


def _check_column(schema, path: Path, field: str) -> None:
    import pyarrow

    if field not in schema.names:
        raise InputError(
            f'{path} has no field "{field}"; its fields are {_names(schema.names)}: name one of them as field'
        )
    kind = schema.field(field).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(values) or pyarrow.types.is_large_string(values)):
        raise InputError(f'{path}: field "{field}" is of type {kind}, not a string: name a field with text')


def _row_text(scalar, path: Path, row: int, field: str) -> str:
    try:
        text = scalar.as_py()
    except UnicodeDecodeError as error:
        raise InputError(
            f'{path}, row {row}: field "{field}" is not UTF-8 at byte offset {error.start}: convert it to UTF-8'
        ) from error
    if text is None:
        raise InputError(f'{path}, row {row}: field "{field}" is null, not a string: remove the row or fill it')
    return text

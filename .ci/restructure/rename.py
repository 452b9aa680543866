"""Rename definitions by a table, with every reference that pyright's language server resolves.

    python .ci/restructure/rename.py .ci/restructure/05_names.txt

A line `learner.trainer:Trainer.started -> dispatch_step` renames a definition in a module of `jaxroll` and every
reference that pyright resolves, in jaxroll, tests, benchmarks and configs. Then it lists each file in which the old
name still occurs as a word (strings, documents, untyped tests).
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path.cwd()
FOLDERS = ("jaxroll", "tests", "benchmarks", "configs")


class Server:
    """A pyright language server that speaks JSON-RPC over its standard streams."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [".venv/bin/pyright-langserver", "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._id = 0
        self._versions: dict[str, int] = {}
        folder = {"uri": ROOT.as_uri(), "name": "root"}
        able = {"workspace": {"configuration": True, "workspaceEdit": {"documentChanges": True}}}
        self.ask(
            "initialize",
            {"processId": None, "rootUri": ROOT.as_uri(), "capabilities": able, "workspaceFolders": [folder]},
        )
        self.notify("initialized", {})

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        size = 0
        while line := self._process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        return json.loads(self._process.stdout.read(size))

    def notify(self, method: str, params: Any) -> None:
        self._send({"method": method, "params": params})

    def ask(self, method: str, params: Any) -> Any:
        """Send a request and return its result; answer the server's own requests in the meantime."""
        self._id += 1
        self._send({"id": self._id, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message:
                if "id" in message:
                    items = (
                        message.get("params", {}).get("items", [])
                        if message["method"].endswith("configuration")
                        else None
                    )
                    self._send({"id": message["id"], "result": [{} for _ in items] if items is not None else None})
            elif message.get("id") == self._id:
                if "error" in message:
                    raise SystemExit(f"{method}: {message['error']}")
                return message.get("result")

    def show(self, path: Path) -> None:
        """Tell the server the text of a file."""
        uri, text = path.as_uri(), path.read_text()
        if uri in self._versions:
            self._versions[uri] += 1
            change = {"textDocument": {"uri": uri, "version": self._versions[uri]}, "contentChanges": [{"text": text}]}
            self.notify("textDocument/didChange", change)
        else:
            self._versions[uri] = 1
            document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
            self.notify("textDocument/didOpen", {"textDocument": document})


def position(path: Path, name: str) -> tuple[int, int]:
    """(line, column) of the definition `Class.method`, `function`, `Class.field` or `CONSTANT`, counted from 0."""
    text = path.read_text()
    body: list[ast.stmt] = ast.parse(text).body
    *owners, last = name.split(".")
    for owner in owners:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == last:
            line = text.splitlines()[node.lineno - 1]
            return node.lineno - 1, line.index(last, line.index("def " if "def " in line else "class ") + 4)
        for target in (
            [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        ):
            for found in ast.walk(target):
                if isinstance(found, ast.Name) and found.id == last:
                    return found.lineno - 1, found.col_offset
    if owners:  # an attribute that a method assigns
        for found in ast.walk(ast.parse(text)):
            if isinstance(found, ast.Attribute) and found.attr == last and isinstance(found.ctx, ast.Store):
                return found.lineno - 1, (found.end_col_offset or 0) - len(last)
    raise SystemExit(f"{path}: no definition of {name}")


def apply(server: Server, edit: dict[str, Any]) -> int:
    """Write an edit of the workspace; return the number of replacements."""
    changes = edit.get("changes") or {}
    files = [(uri, edits) for uri, edits in changes.items()]
    files += [(c["textDocument"]["uri"], c["edits"]) for c in edit.get("documentChanges", []) if "edits" in c]
    count = 0
    for uri, edits in files:
        path = Path(uri.removeprefix("file://"))
        lines = path.read_text().splitlines(keepends=True)
        unique = {
            (
                e["range"]["start"]["line"],
                e["range"]["start"]["character"],
                e["range"]["end"]["character"],
                e["newText"],
            )
            for e in edits
        }
        for line, begin, end, new in sorted(unique, reverse=True):
            lines[line] = lines[line][:begin] + new + lines[line][end:]
            count += 1
        path.write_text("".join(lines))
        server.show(path)
    return count


def main(table: Path) -> None:
    settings = ROOT / "pyrightconfig.json"  # includes the tests; takes precedence over pyproject.toml
    settings.write_text(json.dumps({"include": FOLDERS, "venvPath": ".", "venv": ".venv"}))
    server = Server()
    everything = [p for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py")) if "__pycache__" not in p.parts]
    for path in everything:
        server.show(path)
    rows = [line.partition("#")[0].split("->") for line in table.read_text().splitlines()]
    done = []
    for left, right in ((row[0].strip(), row[1].strip()) for row in rows if len(row) == 2):
        module, _, name = left.partition(":")
        path = ROOT / "jaxroll" / Path(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        line, column = position(path, name)
        edit = server.ask(
            "textDocument/rename",
            {"textDocument": {"uri": path.as_uri()}, "position": {"line": line, "character": column}, "newName": right},
        )
        print(f"{left} -> {right}: {apply(server, edit or {})}", flush=True)
        done.append(name.split(".")[-1])
    settings.unlink()
    for old in done:
        found = [
            str(p.relative_to(ROOT)) for p in everything if re.search(rf"(?<!\w){re.escape(old)}(?!\w)", p.read_text())
        ]
        if found:
            print(f"{old} still occurs in: {' '.join(found)}"[:400])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

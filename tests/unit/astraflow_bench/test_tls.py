"""The benchmark of TLS moves the same bytes with and without it."""

import json

from typer.testing import CliRunner

from astraflow_bench.commands.bench import app


def test_every_kind_of_work_has_both_rates() -> None:
    result = CliRunner().invoke(app, ["tls", "--rounds", "1", "--mib", "1", "--calls", "2", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["tls"]
    assert [row["what"] for row in rows] == ["push", "fetch", "small call"]
    assert all(row[name] > 0 for row in rows for name in row if name not in ("what", "unit"))

"""The benchmark grades with every reward that this machine can run."""

import json

from typer.testing import CliRunner

from astraflow_bench.commands.bench import app


def test_every_reward_has_a_row_with_its_rate() -> None:
    result = CliRunner().invoke(app, ["rewards", "--calls", "2", "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rewards"]
    names = {row["name"].partition(",")[0] for row in rows}
    assert {"BoxedMatch in the loop", "MathVerify in the loop", "MathVerify in workers"} <= names
    assert all(row["per_s"] > 0 and row["ms"] > 0 for row in rows)

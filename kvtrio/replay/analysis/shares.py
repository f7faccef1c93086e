"""Who got what: per adapter set, tenant and purpose."""

from kvtrio.replay.analysis.hits import integers
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.table import Table, count, seconds, share, text

MOST = 20
"""Rows of a table; the others are summed up in one more."""
NONE, OTHERS = "(none)", "(others)"
KEYS = {
    "adapters": ("Adapters", "adapter set", "By content and scale; GET /lora-adapters names them."),
    "tenant": ("Tenants", "tenant", "The holder of an API key, or one user among the holder's."),
    "purpose": ("Purposes", "purpose", "Places in the operator's list of purposes, from 0."),
}


def share_tables(store: Store) -> list[Table]:
    return [_shares(store, key) for key in KEYS]


def _shares(store: Store, key: str) -> Table:
    """Sums in one query; the median of first tokens apart, so that one set of values is held."""
    title, label, note = KEYS[key]
    rows = store.rows(
        f"""WITH named AS (SELECT *, coalesce({key}::VARCHAR, '{NONE}') AS owner FROM requests),
            ranked AS (SELECT owner, row_number() OVER (ORDER BY count(*) DESC, owner) AS rank
                FROM named GROUP BY owner)
        SELECT CASE WHEN rank <= {MOST} THEN owner ELSE '{OTHERS}' END AS shown, count(*),
            count(*) / sum(count(*)) OVER (), sum(prompt), sum(computed), sum(generated),
            sum(prefill_s + decode_s),
            sum(prefill_s + decode_s) / nullif(sum(sum(prefill_s + decode_s)) OVER (), 0),
            count(*) FILTER (class = 'should'),
            count(*) FILTER (class = 'should' AND is_missed),
            count(*) FILTER (class = 'should' AND is_missed)
                / nullif(count(*) FILTER (class = 'should'), 0),
            quantile_disc(first_token_s, 0.5)
        FROM named JOIN ranked USING (owner)
        GROUP BY shown ORDER BY min(least(rank, {MOST + 1}))"""
    )
    columns = (
        text(key, label),
        count("requests", "requests"),
        share("share", "share"),
        count("prompt_tokens", "prompt tokens"),
        count("computed_tokens", "computed"),
        count("generated_tokens", "generated"),
        seconds("place_s", "time in a place"),
        share("place_share", "share"),
        count("turns", "turns that should hit"),
        count("missed", "missed"),
        share("miss_rate", "miss rate"),
        seconds("first_token_p50_s", "first token, median"),
    )
    return Table(
        key=f"by_{key}", title=title, columns=columns, rows=integers(rows, columns), note=note
    )

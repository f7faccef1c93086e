"""Requests as the tables count them: what could have been a hit, and what was missed.

1. Turns are counted once: not the further answers to a prompt (``is_copy``), not what never started
   or asked not to reuse, nor what a replayed server said nothing of (class ``apart``).
2. Class ``should``: turns whose conversation was there, so that their state could have been
   (continuation, regenerate). Class ``cannot``: first turns, rewrites (something else than what is
   known, from some position on), and what came back after so long that nothing promises it.
3. Missed: something that had been known was not reused. The server says why; where it does not (a
   replay against another server), a turn counts as missed that reused less than its session's
   prompt before had, by more than ``NEAR`` tokens. The variable ``is_untold`` sets this for all
   replayed requests, so that two servers are judged alike.
"""

HIT_REASONS = ("nothing_missed", "new_tokens")
APART_REASONS = ("not_started", "caching_off")
SHOULD_TURNS = ("continuation", "regenerate")
NEAR = 64
"""As the server's: tokens behind a checkpoint that are computed again without a word."""

_LOGGED = """
    SELECT
        'log' AS origin, timestamp AS ended, CAST(reason AS VARCHAR) AS reason, place, request_id,
        num_prompt_tokens AS prompt, coalesce(num_cached_tokens, 0) AS cached,
        coalesce(num_computed_tokens, 0) AS computed,
        coalesce(num_generated_tokens, 0) AS generated,
        coalesce(num_device_tokens, 0) AS device, coalesce(num_host_tokens, 0) AS ram,
        num_disk_tokens AS disk, coalesce(num_recomputed_tokens, 0) AS again,
        num_preemptions AS preemptions, queue_s, prefill_s, decode_s,
        queue_s + prefill_s + decode_s AS total_s,
        CASE WHEN num_generated_tokens > 0 THEN queue_s + prefill_s END AS first_token_s,
        gap_p50_s, gap_p99_s, gap_max_s, longest_gap_s, session, tenant, purpose, retain,
        coalesce(num_adapters, 0) > 0 AS is_adapted, adapters, path, miss_reason, turn, is_copy,
        evicted_age_s, longest_gap_cause, longest_gap_at, longest_gap_request_id,
        longest_gap_prefill_tokens, longest_gap_prompt_tokens, longest_gap_prompt_at,
        0 AS scenario_turn
    FROM good WHERE event = 'request.done'"""
_STARTED = """to_timestamp(coalesce(begun_s, 0))::TIMESTAMP"""
_RUNS = """(SELECT source, min(started_s) AS begun_s FROM good WHERE kind = 'run' GROUP BY 1)"""
_REPLAYED = f"""
    SELECT
        'replay', {_STARTED} + to_microseconds(CAST((sent_s + total_s) * 1e6 AS BIGINT)),
        CAST(outcome AS VARCHAR), NULL, id AS request_id,
        coalesce(num_prompt_tokens, 0) AS prompt,
        coalesce(num_cached_tokens, 0), num_prompt_tokens - num_cached_tokens,
        coalesce(num_generated_tokens, 0),
        CASE WHEN path::VARCHAR = 'resident' THEN coalesce(num_cached_tokens, 0) ELSE 0 END,
        CASE WHEN path::VARCHAR = 'ram' THEN coalesce(num_cached_tokens, 0) ELSE 0 END,
        CASE WHEN path::VARCHAR = 'disk' THEN num_cached_tokens END, 0, 0, NULL, prefill_s,
        decode_s, total_s, first_token_s, gap_p50_s, gap_p99_s, gap_max_s, gap_max_s,
        session + (CAST(source AS UBIGINT) << 32) AS session,
        tenant, purpose, retain, adapters IS NOT NULL, adapters, path,
        miss_reason, turn, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, scenario_turn
    FROM good LEFT JOIN {_RUNS} USING (source)
    WHERE kind = 'result' AND outcome IN ('done', 'left', 'failed', 'cut')"""
_IS_UNTOLD = "(origin = 'replay' AND coalesce(getvariable('is_untold'), false))"
_TURNS = f"""
    SELECT *, ended - to_microseconds(CAST(coalesce(total_s, 0) * 1e6 AS BIGINT)) AS arrived,
        CASE WHEN is_copy OR miss_reason IN {APART_REASONS}
                OR (origin = 'replay' AND (reason NOT IN ('done', 'left') OR computed IS NULL))
                THEN 'apart'
             WHEN coalesce(turn, 'unknown') IN {SHOULD_TURNS}
                THEN 'should' ELSE 'cannot' END AS class,
        coalesce(miss_reason::VARCHAR NOT IN {HIT_REASONS}, cached + {NEAR} < before, false)
            AS is_missed
    FROM (SELECT * REPLACE (
            CASE WHEN NOT {_IS_UNTOLD} THEN miss_reason END AS miss_reason,
            CASE WHEN NOT {_IS_UNTOLD} AND turn IS NOT NULL THEN turn::VARCHAR
                WHEN origin = 'log' THEN NULL
                WHEN coalesce(scenario_turn, 0) = 0 THEN 'first' ELSE 'continuation' END AS turn)
          FROM told)"""
VIEWS = (
    "CREATE VIEW good AS SELECT * FROM lines WHERE status = 'good'",
    f"""CREATE VIEW told AS SELECT *, NULL::BIGINT AS before FROM ({_LOGGED})
        UNION ALL SELECT *, CASE WHEN session IS NOT NULL THEN
            lag(prompt) OVER (PARTITION BY session ORDER BY request_id) END
        FROM ({_REPLAYED})""",
    f"CREATE VIEW judged AS {_TURNS}",
)
REQUESTS = "CREATE OR REPLACE TABLE requests AS SELECT * FROM judged"
"""A table, since every query would compute the view again, and plan it."""

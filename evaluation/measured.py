# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/measurements.md that are plain lists of what a result file holds: which columns, in which words."""

from collections.abc import Callable, Mapping
from typing import Any

Document = Mapping[str, Any]
Cell = Callable[[Document], str]
Columns = Mapping[str, Cell]


def plain(columns: Columns, head: Callable[[Document], str], name: str = "rows") -> Callable[[Document], list[str]]:
    """A table with one line for each of a document's rows.

    Args:
        columns: title → how a row is written there.
        head: the sentence above, from the document.
        name: of the rows in the document.

    Returns:
        Makes the lines of the table.
    """

    def table(document: Document) -> list[str]:
        lines = [head(document), "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        return lines + [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in document[name]]

    return table


def text(name: str, none: str = "") -> Cell:
    """A value as it is."""
    return lambda row: none if row.get(name) is None else str(row[name])


def number(name: str, form: str = ".3f") -> Cell:
    """A number in a form such as ".3f"."""
    return lambda row: "" if row.get(name) is None else format(row[name], form)


def percent(name: str, form: str = ".0f") -> Cell:
    """A share in percent."""
    return lambda row: "" if row.get(name) is None else f"{100 * row[name]:{form}} %"


def bracket(score: str, low: str, high: str, form: str = ".3f") -> Cell:
    """A value with the ends of its interval."""
    return lambda row: f"{row[score]:{form}} [{row[low]:{form}}, {row[high]:{form}}]"


def ends(name: str, form: str = "+.3f") -> Cell:
    """An interval alone."""
    return lambda row: "" if row.get(name) is None else f"[{row[name][0]:{form}}, {row[name][1]:{form}}]"


def bracket_of(score: str, name: str) -> Cell:
    """A value with its interval."""
    return lambda row: f"{row[score]:.3f} {ends(name, '.3f')(row)}"


def gained(name: str, form: str = "+.0f") -> Cell:
    """A difference with its interval; nothing of the row that others are compared with."""
    interval = f"{name}_interval"
    return lambda row: f"{row[name]:{form}} {ends(interval, form)(row)}" if row.get(name) is not None else ""


def megabytes(name: str) -> Cell:
    """Bytes in 10^6 of them."""
    return lambda row: f"{row[name] / 1e6:.1f}" if row.get(name) is not None else ""


def _rounds(document: Document) -> str:
    return f"Shape of {document['shape']}, {document['threads']} threads, median of {document['rounds']}, interleaved."


def _loaded(document: Document) -> str:
    if document.get("model"):
        return f"`{document['model']}`, one prompt of {document['rows'][0]['prompt_tokens']} tokens"
    tokens = f"{document['chunks']} chunks of {document['chunk_tokens']} tokens"
    return f"{tokens}, {document['layers']} layers with random weights, heads tied"


MEASURED = {
    "eval": plain(
        {
            "method": text("method"),
            "nominal": percent("ratio"),
            "charged": percent("charged_budget", ".1f"),
            "exact match, 95 % interval": bracket("score", "low", "high"),
            "difference to full prefill": bracket("difference", "difference_low", "difference_high", "+.3f"),
            "normalised": number("normalised"),
            "KL": number("kl", ".4f"),
            "same output": percent("exact_output", ".1f"),
        },
        lambda document: f"n = {document['rows'][0]['n']} questions of the reference world.",
    ),
    "images": plain(
        {
            "proportions": text("family"),
            "images": text("method"),
            "charged": percent("charged_budget"),
            "speed-up": lambda row: f"{row['times_faster']:.1f} x",
            "pixels": lambda row: f"{row['pixel_bytes_per_image'] / 1e3:.0f} kB",
            "stored": lambda row: f"{row['stored_bytes_per_image'] / 1e3:.0f} kB",
        },
        lambda document: (
            f"{document['shape']['images']} images of {document['shape']['tokens_per_image']} tokens, "
            f"{document['shape']['layers']} layers of width {document['shape']['width']}, "
            f"{document['machine']['dtype']}, {document['machine']['threads']} thread, median of "
            f"{document['shape']['rounds']}."
        ),
    ),
    "hybrids": plain(
        {
            "shape": text("shape"),
            "layers, of these with a mixer": lambda row: f"{row['layers']}, {row['mixers']}",
            "full prefill": lambda row: f"{row['stock_ms'] / 1e3:.1f} s",
            "of it scan, attention": lambda row: f"{row['scan_ms'] / 1e3:.1f} s, {row['attention_ms'] / 1e3:.1f} s",
            "blended": lambda row: f"{row['blend_ms'] / 1e3:.1f} s",
            "speed-up": lambda row: f"{row['speedup']:.2f} x",
            "bound": lambda row: f"{row['bound']:.2f} x",
            "share of it, worst round": lambda row: f"{row['share_of_bound']:.2f}, {row['least_share_of_bound']:.2f}",
            "FLOP bound": lambda row: f"{row['flop_bound']:.1f} x",
            "charged": percent("charged_budget"),
            "bytes of a token: K and V, projections": lambda row: (
                f"{row['keys_values_bytes_per_token']:,} + {row['projections_bytes_per_token']:,}"
            ),
            "projections without the column probe": lambda row: f"{row['all_columns_bytes_per_token']:,}",
            "slowest tier that pays": lambda row: f"{row['least_tier_mb_s']:.0f} MB/s",
        },
        lambda document: (
            f"{document['chunks']} chunks of {document['chunk_tokens']} tokens and {document['question_tokens']} of "
            f"question, {100 * document['ratio']:.0f} % recomputed ({document['selector']}), {document['dtype']}, "
            f"{document['threads']} thread, median of {document['rounds']} rounds in turn."
        ),
    ),
    "decode": plain(
        {
            "context": text("context"),
            "tokens/s": number("blend_tokens_s", ".1f"),
            "beside DynamicCache": number("vs_dynamic", ".2f"),
            "beside StaticCache": number("vs_static", ".2f"),
        },
        _rounds,
    ),
    "offload": plain(
        {
            "context": text("context"),
            "cache": text("cache"),
            "K and V, MB": lambda row: f"{row['kv_bytes'] / 1e6:.0f}" if "kv_bytes" in row else "",
            "held at most, MB": lambda row: (
                f"{row['peak_resident_bytes'] / 1e6:.0f} of {row['limit_bytes'] / 1e6:.0f} allowed"
                if "limit_bytes" in row
                else ""
            ),
            "tokens/s": number("tokens_s", ".2f"),
            "beside KV on the device": number("vs_device", ".2f"),
            "same tokens": lambda row: row.get("error") or ("yes" if row["equal_text"] else "NO"),
        },
        _rounds,
    ),
    "sparse_decode": plain(
        {
            "context": text("context"),
            "way": text("way"),
            "tokens/s": number("tokens_s", ".1f"),
            "beside dense": number("vs_dense", ".2f"),
            "attention kept (random KV)": percent("kept_mass"),
        },
        _rounds,
    ),
    "store_plan": plain(
        {
            "shape": text("shape"),
            "ratio": percent("ratio"),
            "GPU, an hour": number("gpu_hour", ".0f"),
            "from memory, s": number("in_memory_s", ".2f"),
            "devices: request expected / measured, s": lambda row: "; ".join(
                f"{one['device']} {one['request_s']:.2f} / {one['measured_s']:.2f}" for one in row["devices"]
            ),
            "chosen": text("chosen"),
            "best": text("best"),
            "chosen is best in": percent("chosen_share"),
        },
        lambda document: (
            f"Right in {document['right']} of {len(document['rows'])} cells, refuted in {document['refuted']}; "
            f"{document['chunks']} chunks of {document['chunk_tokens']} tokens, {document['threads']} threads, "
            f"median of {document['rounds']}."
        ),
    ),
    "sparse_offload": plain(
        {
            "context": text("context"),
            "K and V": text("place"),
            "way": text("way"),
            "tokens/s": number("tokens_s", ".1f"),
            "beside dense there": number("vs_dense_there", ".2f"),
            "beside dense on the device": number("vs_dense_on_device", ".2f"),
            "on the device": percent("device_share", ".1f"),
            "all tensors": percent("live_share"),
            "blocks loaded": text("loaded_blocks"),
            "of these read ahead": text("prefetched_blocks"),
        },
        _rounds,
    ),
    "sparse_offload_answers": plain(
        {
            "method": text("method"),
            "blocks": percent("share"),
            "held": text("locked"),
            "right": number("right", ".3f"),
            "interval": ends("interval", ".3f"),
            "difference to dense": ends("difference_interval"),
        },
        lambda document: f"n = {document['rows'][0]['n']}, blocks of {document['block_tokens']} tokens.",
    ),
    "kvstar_draft": plain(
        {
            "way": text("way"),
            "blocks": percent("share"),
            "looked at": percent("looked_share"),
            "sentences right (F1)": bracket_of("score", "interval"),
            "difference to dense": ends("difference_to_dense"),
            "to the same without a draft": ends("difference_to_no_draft"),
            "to random blocks": ends("difference_to_random"),
            "whole answers right": percent("whole_right", ".1f"),
            "same text as dense": percent("same_text"),
            "accepted": percent("acceptance"),
            "its interval": ends("acceptance_interval", ".2f"),
            "tokens/s": number("tokens_s", ".0f"),
            "beside dense": number("vs_dense", ".2f"),
            "beside dense with a draft": number("vs_dense_draft", ".2f"),
        },
        lambda document: (
            f"n = {document['rows'][0]['n']} questions, {document['rows'][0]['prompt_tokens']:.0f} tokens, blocks of "
            f"{document['block_tokens']}; {document['layers']} layers, the draft {document['draft_layers']}, "
            f"{document['threads']} thread, medians of ratios of the same question."
        ),
    ),
    "kvstar_overlap": plain(
        {
            "layer": text("layer"),
            "way": text("way"),
            "Jaccard index": number("jaccard"),
            "chance": number("chance"),
            "difference to chance": ends("difference_to_chance"),
            "n": text("n"),
        },
        lambda document: f"Blocks of {document['block_tokens']} tokens.",
        "kvstar_overlap",
    ),
    "sparse_quality": plain(
        {
            "task": text("task"),
            "method": text("method"),
            "blocks": percent("share"),
            "held": text("locked"),
            "exact match": number("exact_match"),
            "interval": ends("interval", ".3f"),
            "difference to dense": ends("difference_interval"),
            "attention kept": percent("kept_mass"),
        },
        lambda document: f"n = {document['rows'][0]['n']}, blocks of {document['block_tokens']} tokens.",
    ),
    "partial_load": plain(
        {
            "shape": text("shape"),
            "disk, GB/s": text("rate_gb_s", "its own"),
            "all MB": lambda row: f"{row['all_bytes'] / 1e6:.1f}",
            "loaded MB": lambda row: f"{row['loaded_bytes'] / 1e6:.1f}",
            "fewer bytes": number("fewer_bytes", ".2f"),
            "fallback layers": lambda row: f"{row['fallback_layers']} of {row['layers']}",
            "all, ms": number("all_ttft_ms", ".0f"),
            "in part, ms": number("partial_ttft_ms", ".0f"),
            "ratio": number("ttft_ratio", ".2f"),
        },
        lambda document: (
            f"{_loaded(document)}, {100 * document['share']:.0f} % of the blocks, cold, "
            f"{document['threads']} threads, median of {document['rounds']}."
        ),
    ),
    "partial_quality": plain(
        {
            "loaded, kB": lambda row: f"{row['loaded_bytes'] / 1e3:.0f}",
            "stored, kB": lambda row: f"{row['all_bytes'] / 1e3:.0f}",
            "share": percent("loaded_share"),
            "blocks": text("way"),
            "exact match": number("exact_match"),
            "difference to all": ends("difference_interval"),
            "same answers": percent("same_answers"),
            "layers in part": number("partial_layers", ".1f"),
            "that fell back": number("fallback_layers", ".1f"),
            "time to all": number("time_ratio", ".2f"),
        },
        lambda document: (
            f"{document['model']}, {document['kv_heads']} KV heads, {document['layers']} layers, n = {document['n']}, "
            f"batches of {document['batch']}, {100 * document['recompute_ratio']:.0f} % recomputed (kv-deviation), "
            f"behind a restart, {document['threads']} thread."
        ),
    ),
    "eviction": plain(
        {
            "memory": percent("cap"),
            "policy": text("policy"),
            "important tokens hit": number("important_hit_rate"),
            "interval": ends("important_hit_rate_interval", ".3f"),
            "chunks hit": number("hit_rate"),
            "interval ": ends("hit_rate_interval", ".3f"),
            "ms to load what is important": number("part_load_ms", ".2f"),
            "ms to load all": number("whole_load_ms", ".2f"),
            "first token, in part, ms": number("part_ttft_ms", ".0f"),
            "importance saves, ms": gained("part_saved_ms"),
            "first token, whole, ms": number("whole_ttft_ms", ".0f"),
            "importance saves, ms ": gained("whole_saved_ms"),
            "MB from the slower tier, in part": megabytes("part_slow_bytes"),
            "MB, whole": megabytes("whole_slow_bytes"),
        },
        lambda document: (
            f"{document['stories']} stories, {document['chunks']} chunks, {document['questions']} questions of each, "
            f"{document['requests']} requests, Zipf {document['zipf']}, {document['seeds']} seeds, a tier of "
            f"{document['rate_gb_s']} GB/s behind: milliseconds to load are counted from bytes. First tokens are "
            f"measured: {document['served']} of these requests under each policy in turn, the slower tier at "
            f"{document['served_gb_s']} GB/s, {document['threads']} thread, medians; what importance saves is the "
            "median of the differences of the same requests, with its 95 % interval."
        ),
    ),
    "pipeline": plain(
        {
            "load / compute": number("load_to_compute", "g"),
            "loading, ms": number("load_ms", ".0f"),
            "computing, ms": number("compute_ms", ".0f"),
            "both, ms": number("pipelined_ms", ".0f"),
            "to the longer": number("vs_max", ".3f"),
            "by round, median": number("median_vs_max", ".3f"),
            "worst round": number("worst_vs_max", ".3f"),
            "best fixed plan: chunks near, far": lambda row: f"{row['best_near_chunks']}, {row['best_far_chunks']}",
            "its ratio": percent("best_ratio"),
            "ms": number("best_ms", ".0f"),
            "the controller's plan": lambda row: f"{row['advised_near_chunks']}, {row['advised_far_chunks']}",
            "its own ratio": percent("advised_ratio"),
            "expected, ms": number("predicted_ms", ".0f"),
            "was, ms": number("controller_ms", ".0f"),
            "to the best": number("vs_best", ".3f"),
            "of medians": number("median_vs_best", ".3f"),
        },
        lambda document: (
            f"Shape of {document['shape']}, random weights, {document['chunks']} chunks of {document['chunk_tokens']} "
            f"tokens, half of them on each tier; the fastest of {document['rounds']} for the pipeline, of "
            f"{document['plan_rounds']} for the {len(document['plans']) // len(document['rows'])} fixed plans of each "
            "cell."
        ),
    ),
    "serve": plain(
        {
            "way": text("way"),
            "arrivals, of full prefill's capacity": percent("share"),
            "requests/s": number("requests_s"),
            "first token p50, s": number("first_token_p50_s", ".1f"),
            "p95": number("first_token_p95_s", ".1f"),
            "p99": number("first_token_p99_s", ".1f"),
            "next token p50, s": number("next_token_p50_s", ".2f"),
            "p95, s": number("next_token_p95_s", ".2f"),
            "p99, s": number("next_token_p99_s", ".2f"),
            "charged": percent("charged_budget"),
            "replay off by, p95": percent("replayed_first_token_p95_s", "+.0f"),
        },
        lambda document: (
            f"Shape of {document['machine']['shape']}, random weights, n = {document['plan']['requests']} requests in "
            f"each row, prompts of {document['plan']['chunks']} x {document['plan']['chunk_tokens']} + "
            f"{document['plan']['question_tokens']} tokens, {document['plan']['new_tokens']} tokens to answer; where "
            "no share is given, all came at once."
        ),
    ),
    "ttft_disk": plain(
        {
            "disk, GB/s": text("rate_gb_s", "its own"),
            "loading": number("load_ms", ".0f"),
            "computing": number("compute_ms", ".0f"),
            "one after the other": number("sequential_ms", ".0f"),
            "side by side": number("pipelined_ms", ".0f"),
            "to the longer": number("vs_max", ".2f"),
            "to the sum": number("vs_sum", ".2f"),
            "advised ratio": percent("advised_ratio"),
            "expected": number("predicted_ms", ".0f"),
            "was": number("advised_ms", ".0f"),
        },
        lambda document: (
            f"Milliseconds to the first token. Shape of {document['machine']['shape']}, "
            f"{document['machine']['threads']} threads, median of {document['machine']['rounds']}, files forgotten "
            "before each run."
        ),
    ),
}


def store(document: Document) -> list[str]:
    """Reading with verification beside reading."""
    lines = [
        f"Entries of {document['plan']['tokens']} tokens, {document['plan']['layers']} layers. Put with full "
        f"durability: {document['put_mb_s']:.0f} MB/s. A store of {document['open_entries']:,} entries opens in "
        f"{document['open_s']:.2f} s.",
        "",
        "| files | read and verified | plainly read | share |",
        "|---|---|---|---|",
    ]
    for state in ("warm", "cold"):
        row = document[state]
        speeds = f"{row['read_mb_s']:.0f} MB/s | {row['raw_mb_s']:.0f} MB/s"
        lines.append(f"| {state} | {speeds} | {row['share_of_raw_read']:.2f} |")
    return lines


acceptance = plain(
    {
        "draft": text("draft"),
        "verification held": lambda row: "yes" if row["locked"] else "no",
        "proposed": text("proposed"),
        "accepted": percent("acceptance"),
    },
    lambda document: f"Blocks of {document['block_tokens']} tokens.",
    "acceptance",
)

"""Writes the Grafana dashboards and the Prometheus rules of this folder: ``python dashboards/generate.py --write``.

Without ``--write`` it says what is out of date and exits with 1. Needs grafana-foundation-sdk and PyYAML (in the extra ``test``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, table, tempo, timeseries
from grafana_foundation_sdk.builders import common as build_common
from grafana_foundation_sdk.cog import builder as cog_builder
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import tempo as tempo_model

HERE = Path(__file__).parent
RUN = 'fsdptrace_run_id="$run"'
RANKS = f'{RUN},dl_rank=~"$rank"'
METRICS = common.DataSourceRef(type_val="prometheus", uid="${metrics}")
TEMPO = common.DataSourceRef(type_val="tempo", uid="${tempo}")
JAEGER = common.DataSourceRef(type_val="jaeger", uid="${jaeger}")
NO_DEVICE_TIMING = "no device timing in this run"
TAGS = ["fsdptrace", "fsdp2", "pytorch"]


class JaegerSearch(variants.Dataquery):
    """A search in Jaeger, in the form in which its data source stores it; the SDK has no builder for it."""

    def __init__(self, service: str, operation: str, tags: str, ref: str) -> None:
        self.fields = {
            "refId": ref, "queryType": "search", "service": service, "operation": operation, "tags": tags, "limit": 50,
            "datasource": {"type": "jaeger", "uid": "${jaeger}"},
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """As the encoder wants it."""
        return self.fields


class _Ready(cog_builder.Builder[Any]):
    """A builder of something that is built."""

    def __init__(self, built: Any) -> None:
        self._built = built

    def build(self) -> Any:
        """The thing."""
        return self._built


def query(expr: str, legend: str = "", instant: bool = False) -> prometheus.Dataquery:
    """A PromQL query."""
    made = prometheus.Dataquery().expr(expr).legend_format(legend).datasource(METRICS)
    return made.instant() if instant else made.range()


def _queries(panel: Any, queries: Sequence[Any]) -> Any:
    for number, item in enumerate(queries):
        panel = panel.with_target(item.ref_id("ABCDEFGH"[number]) if hasattr(item, "ref_id") else item)
    return panel


def to_traces(panel: Any) -> Any:
    """Links from a point of a metric to the step traces of its run and time."""
    link = dashboard.DashboardLink("Step traces of this time").url("/d/fsdptrace-traces?var-run=${run}&${__url_time_range}")
    return panel.data_links([link])


def lines(title: str, unit: str, text: str, *queries: Any, width: int = 12, empty: str = "") -> timeseries.Panel:
    """A graph."""
    panel = timeseries.Panel().title(title).description(text).unit(unit).span(width).height(8).datasource(METRICS)
    panel = panel.min(0).fill_opacity(8).line_width(1.5).show_points(common.VisibilityMode.NEVER)
    panel = panel.tooltip(build_common.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if empty:
        panel = panel.no_value(empty)
    return to_traces(_queries(panel, queries))


def figure(title: str, unit: str, text: str, expr: str, red_above: float | None = None) -> stat.Panel:
    """One large number; red above a limit."""
    panel = stat.Panel().title(title).description(text).unit(unit).span(4).height(4).datasource(METRICS)
    panel = panel.with_target(query(expr, instant=True).ref_id("A"))
    if red_above is not None:
        steps = [model.Threshold(color="green", value=None), model.Threshold(color="red", value=red_above)]
        panel = panel.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    return panel


def bars(title: str, text: str, expr: str, legend: str, empty: str, unit: str = "short", width: int = 12) -> bargauge.Panel:
    """A bar per series, as it stands now."""
    panel = bargauge.Panel().title(title).description(text).unit(unit).span(width).height(8).datasource(METRICS).no_value(empty)
    panel = panel.orientation(common.VizOrientation.HORIZONTAL)
    return panel.with_target(query(expr, legend, instant=True).ref_id("A"))


def traces(
    title: str, text: str, *queries: Any, source: common.DataSourceRef, height: int = 10, width: int = 24
) -> table.Panel:
    """A table of traces or spans, whose ids lead to the trace."""
    return _queries(table.Panel().title(title).description(text).span(width).height(height).datasource(source), queries)


def traceql(text: str, ref: str = "A", spans: bool = False) -> tempo.Dataquery:
    """A TraceQL search."""
    made = tempo.Dataquery().query_type("traceql").query(text).limit(50).ref_id(ref).datasource(TEMPO)
    return made.table_type(tempo_model.SearchTableType.SPANS) if spans else made


def _variables(board: dashboard.Dashboard, kinds: Sequence[str]) -> dashboard.Dashboard:
    for kind in kinds:
        name = "metrics" if kind == "prometheus" else kind
        board = board.with_variable(dashboard.DatasourceVariable(name).label(kind.capitalize()).type(kind))
    if "prometheus" not in kinds:
        return board.with_variable(dashboard.TextBoxVariable("run").label("Run"))
    run = dashboard.QueryVariable("run").label("Run").datasource(METRICS).refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    board = board.with_variable(run.query("label_values(fsdp_step, fsdptrace_run_id)"))
    rank = dashboard.QueryVariable("rank").label("Rank").datasource(METRICS).multi(True).include_all(True).all_value(".*")
    rank = rank.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.NUMERICAL_ASC)
    return board.with_variable(rank.query(f"label_values(fsdp_step{{{RUN}}}, dl_rank)"))


def _board(uid: str, title: str, text: str, kinds: Sequence[str]) -> dashboard.Dashboard:
    board = dashboard.Dashboard(title).uid(uid).description(text).tags(TAGS).refresh("10s").time("now-30m", "now").editable()
    board = board.link(
        dashboard.DashboardLink("fsdptrace").type(model.DashboardLinkType.DASHBOARDS).tags(TAGS[:1]).as_dropdown(True)
        .include_vars(True).keep_time(True)
    )  # fmt: skip
    return _variables(board, kinds)


def row(board: dashboard.Dashboard, title: str, *panels: Any) -> None:
    """Adds a row of panels; without a title, panels alone."""
    if title:
        board.with_row(dashboard.Row(title))
    for panel in panels:
        board.with_panel(panel)


def overview() -> dashboard.Dashboard:
    """A run at a glance."""
    board = _board("fsdptrace-overview", "FSDP2 run overview", "A training run under fsdptrace, all ranks", ["prometheus"])
    quantile = "histogram_quantile({q}, sum by (le{by}) (rate({metric}_bucket{{{ranks}}}[$__rate_interval])))"
    per_step = (
        f"sum by (dl_rank) (rate({{}}{{{{{RANKS}}}}}[$__rate_interval])) / "
        f"sum by (dl_rank) (rate(fsdp_step_device_duration_seconds_count{{{{{RANKS}}}}}[$__rate_interval]))"
    )
    row(
        board, "Now",
        figure("Ranks", "short", "Ranks that report", f"count(count by (dl_rank) (fsdp_step{{{RUN}}}))"),
        figure("Step", "short", "Newest finished step", f"max(fsdp_step{{{RUN}}})"),
        figure("Ranks apart by", "short", "Steps between the first rank and the last one",
               f"max(fsdp_step{{{RUN}}}) - min(fsdp_step{{{RUN}}})", 1),
        figure("Last event", "s", "Time since the quietest rank did anything", f"max(fsdp_last_event_age_seconds{{{RUN}}})", 300),
        figure("Errors", "short", "Violations of severity error",
               f'sum(fsdp_violations_total{{{RUN},fsdp_severity="error"}}) or vector(0)', 1),
        figure("Held past backward", "bytes", "At the end of the newest step, on the rank that holds most",
               f"max(fsdp_unsharded_past_backward_bytes{{{RUN}}})", 1),
    )  # fmt: skip
    row(
        board, "Time",
        lines("Step time", "s", "Mean time from one step's end to the next, by rank",
              query(f"sum by (dl_rank) (rate(fsdp_step_duration_seconds_sum{{{RANKS}}}[$__rate_interval])) / "
                    f"sum by (dl_rank) (rate(fsdp_step_duration_seconds_count{{{RANKS}}}[$__rate_interval]))",
                    "rank {{dl_rank}}")),
        lines("Step time over all ranks", "s", "Quantiles",
              query(quantile.format(q=0.5, by="", metric="fsdp_step_duration_seconds", ranks=RANKS), "median"),
              query(quantile.format(q=0.95, by="", metric="fsdp_step_duration_seconds", ranks=RANKS), "95 %")),
        lines("Steps behind the first rank", "short", "By rank",
              query(f"max by (fsdptrace_run_id) (fsdp_step{{{RUN}}}) - on (fsdptrace_run_id) group_right "
                    f"max by (fsdptrace_run_id, dl_rank) (fsdp_step{{{RANKS}}})", "rank {{dl_rank}}")),
        lines("Time since the last event", "s", "By rank: grows where a rank stands still",
              query(f"max by (dl_rank) (fsdp_last_event_age_seconds{{{RANKS}}})", "rank {{dl_rank}}")),
    )  # fmt: skip
    row(
        board, "Memory in gathered parameters",
        lines("Gathered", "bytes", "At the end of a step, and the peak within it, by rank",
              query(f"max by (dl_rank) (fsdp_unsharded_memory_peak_bytes{{{RANKS}}})", "peak, rank {{dl_rank}}"),
              query(f"max by (dl_rank) (fsdp_unsharded_memory_bytes{{{RANKS}}})", "at the end, rank {{dl_rank}}")),
        lines("Held past backward", "bytes", "Gathered although the backward of the unit was over: the curve of a leak",
              query(f"max by (dl_rank) (fsdp_unsharded_past_backward_peak_bytes{{{RANKS}}})", "peak, rank {{dl_rank}}"),
              query(f"max by (dl_rank) (fsdp_unsharded_past_backward_bytes{{{RANKS}}})", "at the end, rank {{dl_rank}}")),
    )  # fmt: skip
    row(
        board, "Communication",
        lines("Host time to issue an all-gather", "s", "Of steps written in full; it is no time of the device",
              query(quantile.format(q=0.5, by=",fsdp_pass", metric="fsdp_unshard_host_duration_seconds", ranks=RANKS),
                    "median, {{fsdp_pass}}"),
              query(quantile.format(q=0.95, by=",fsdp_pass", metric="fsdp_unshard_host_duration_seconds", ranks=RANKS),
                    "95 %, {{fsdp_pass}}")),
        lines("Device time of all-gathers", "s", "Of steps whose device was timed, which an accelerator is needed for; and for how long compute waited",
              query(quantile.format(q=0.95, by="", metric="fsdp_allgather_duration_seconds", ranks=RANKS), "95 %"),
              query(f"sum by (fsdp_collective) (rate(fsdp_communication_exposed_seconds_total{{{RANKS}}}[$__rate_interval]))",
                    "compute waits a second for {{fsdp_collective}}"),
              empty=NO_DEVICE_TIMING),
        lines("Bytes on the wire", "Bps", "What a rank receives, by mesh and collective, over the chosen ranks",
              query(f"sum by (fsdp_mesh, fsdp_collective) (rate(fsdp_communication_io_bytes_total{{{RANKS}}}[$__rate_interval]))",
                    "{{fsdp_mesh}} {{fsdp_collective}}")),
        lines("All-gathers", "short", "Per second, by pass; and those whose result was freed unused",
              query(f"sum by (fsdp_pass) (rate(fsdp_gathers_total{{{RANKS}}}[$__rate_interval]))", "{{fsdp_pass}}"),
              query(f"sum(rate(fsdp_gathers_unused_total{{{RANKS}}}[$__rate_interval])) or vector(0)", "unused")),
    )  # fmt: skip
    row(
        board, "On the device, of steps that were timed there",
        lines("Device time of a step", "s", "Mean by rank, and how much of it compute waited for collectives",
              query(per_step.format("fsdp_step_device_duration_seconds_sum"), "rank {{dl_rank}}"),
              query(per_step.format("fsdp_communication_exposed_seconds_total"), "waited, rank {{dl_rank}}"),
              empty=NO_DEVICE_TIMING),
        lines("Device time of reductions", "s", "Of reduce-scatters and all-reduces",
              query(quantile.format(q=0.95, by=",fsdp_collective", metric="fsdp_reduction_duration_seconds", ranks=RANKS),
                    "95 %, {{fsdp_collective}}"), empty=NO_DEVICE_TIMING),
        lines("Memory of the device's allocator", "bytes", "Most at a unit's boundary, newest timed step, by rank",
              query(f"max by (dl_rank) (fsdp_allocated_memory_peak_bytes{{{RANKS}}})", "given out, rank {{dl_rank}}"),
              query(f"max by (dl_rank) (fsdp_reserved_memory_peak_bytes{{{RANKS}}})", "held, rank {{dl_rank}}"),
              width=24, empty=f"{NO_DEVICE_TIMING}, or on the CPU, which has none"),
    )  # fmt: skip
    row(
        board, "Findings, and the tracer itself",
        bars("Violations by rule", "So far, over the chosen ranks",
             f"sum by (fsdp_rule, fsdp_severity) (fsdp_violations_total{{{RANKS}}})", "{{fsdp_severity}} {{fsdp_rule}}",
             "none found"),
        lines("fsdptrace's own cost", "percentunit", "CPU time of its threads in training, and of the exporter, in cores",
              query(f"sum by (dl_rank, fsdptrace_part) (rate(fsdptrace_overhead_seconds_total{{{RANKS}}}[$__rate_interval]))",
                    "{{fsdptrace_part}}, rank {{dl_rank}}")),
        lines("Events lost", "short", "Not in memory (recorder), not in the files (files), refused by the back end (exporter)",
              query(f"sum by (fsdptrace_where) (fsdptrace_dropped_total{{{RANKS}}})", "{{fsdptrace_where}}")),
    )  # fmt: skip
    return board


def units() -> dashboard.Dashboard:
    """What single units do."""
    text = (
        "Per unit: needs FSDPTRACE_METRIC_MODULES=1 in the exporter's environment for the graphs; the tables come from traces"
    )
    board = _board("fsdptrace-units", "FSDP2 units", text, ["prometheus", "tempo"])
    empty = "set FSDPTRACE_METRIC_MODULES=1 to have module names on metrics"
    top = (
        f'topk(15, sum by (fsdp_module_fqn) (rate({{metric}}_sum{{{{{RANKS},fsdp_module_fqn!=""}}}}[$__rate_interval])) / '
        f'sum by (fsdp_module_fqn) (rate({{metric}}_count{{{{{RANKS},fsdp_module_fqn!=""}}}}[$__rate_interval])))'
    )
    spans = '{{ name = "{name}" && resource.fsdptrace.run.id = "$run" }}'
    row(
        board, "",
        lines("Host time to issue a unit's all-gather", "s", "Mean, the 15 units that take longest",
              query(top.format(metric="fsdp_unshard_host_duration_seconds"), "{{fsdp_module_fqn}}"), empty=empty),
        bars("All-gathers by unit", "Of steps written in full, so far",
             f'topk(15, sum by (fsdp_module_fqn) (fsdp_unshard_host_duration_seconds_count{{{RANKS},fsdp_module_fqn!=""}}))',
             "{{fsdp_module_fqn}}", empty),
        lines("Units that compute waits for", "s", "On the device, per second of training, the 15 that are waited for longest",
              query(f'topk(15, sum by (fsdp_module_fqn) (rate(fsdp_communication_exposed_seconds_total{{{RANKS},fsdp_module_fqn!=""}}'
                    "[$__rate_interval])))", "{{fsdp_module_fqn}}"), width=24,
              empty=f"{NO_DEVICE_TIMING}, or {empty}"),
        lines("Host time of a recomputation", "s", "Mean, of steps written in full",
              query(f"sum by (dl_rank) (rate(fsdp_recompute_duration_seconds_sum{{{RANKS}}}[$__rate_interval])) / "
                    f"sum by (dl_rank) (rate(fsdp_recompute_duration_seconds_count{{{RANKS}}}[$__rate_interval]))",
                    "rank {{dl_rank}}"), width=24, empty="no checkpointed function was recomputed"),
        traces("Longest gathered", "How long units stayed gathered, from the traces of units",
               traceql(spans.format(name="fsdp.unsharded") + " | select(span.fsdp.module.fqn, span.fsdp.bytes)", spans=True),
               source=TEMPO),
        traces("Prefetched all-gathers", "Who asked for them",
               traceql('{ name = "fsdp.unshard" && span.fsdp.prefetch.direction != nil && resource.fsdptrace.run.id = "$run" }'
                       " | select(span.fsdp.module.fqn, span.fsdp.issuer.fqn, span.fsdp.prefetch.mode)", spans=True),
               source=TEMPO),
    )  # fmt: skip
    return board


def step_traces() -> dashboard.Dashboard:
    """The traces of steps, in Tempo and in Jaeger."""
    board = _board("fsdptrace-traces", "FSDP2 step traces", "One trace per step, all ranks in it", ["tempo", "jaeger"])
    step = 'name = "fsdp.step" && span.fsdptrace.run.id = "$run"'
    tag = 'fsdptrace.run.id="$run"'
    rank = "fsdp.rank"
    row(
        board, "",
        traces("Steps (Tempo)", "Newest first", traceql(f"{{ {step} }} | select(span.fsdp.step)"), source=TEMPO),
        traces("Steps with an error (Tempo)", "A rank with a violation, an exception, or one that died",
               traceql('{ name = "fsdp.rank" && status = error && span.fsdptrace.run.id = "$run" }'
                       " | select(span.fsdp.step, span.dl.rank, statusMessage)", spans=True), source=TEMPO),
        traces("Slow steps (Tempo)", "Of more than a second", traceql(f"{{ {step} && duration > 1s }}"), source=TEMPO),
        traces("Steps (Jaeger)", "Newest first", _Ready(JaegerSearch("fsdptrace", "fsdp.step", tag, "A")), source=JAEGER),
        traces("Steps with an error (Jaeger)", "A rank with a violation, an exception, or one that died",
               _Ready(JaegerSearch("fsdptrace", rank, f"error=true {tag}", "A")), source=JAEGER),
    )  # fmt: skip
    return board


BY_RANK = "fsdptrace_run_id, dl_rank"


def rules() -> dict[str, Any]:
    """Recording and alert rules."""

    def record(name: str, expr: str) -> dict[str, Any]:
        return {"record": name, "expr": expr}

    def alert(name: str, expr: str, severity: str, summary: str, text: str, wait: str = "0m") -> dict[str, Any]:
        return {
            "alert": name, "expr": expr, "for": wait, "labels": {"severity": severity},
            "annotations": {"summary": summary, "description": text},
        }  # fmt: skip

    duration = "fsdp_step_duration_seconds"
    return {
        "groups": [
            {
                "name": "fsdptrace-recording",
                "rules": [
                    record("fsdptrace:step:median", "quantile by (fsdptrace_run_id) (0.5, fsdp_step)"),
                    record("fsdptrace:step_duration_seconds:mean5m",
                           f"sum by ({BY_RANK}) (rate({duration}_sum[5m])) / sum by ({BY_RANK}) (rate({duration}_count[5m]))"),
                    record("fsdptrace:step_duration_seconds:p95_5m",
                           f"histogram_quantile(0.95, sum by (fsdptrace_run_id, le) (rate({duration}_bucket[5m])))"),
                    record("fsdptrace:unsharded_memory_peak_bytes:max", "max by (fsdptrace_run_id) (fsdp_unsharded_memory_peak_bytes)"),
                    record("fsdptrace:communication_io_bytes:rate5m",
                           "sum by (fsdptrace_run_id, fsdp_mesh, fsdp_collective) (rate(fsdp_communication_io_bytes_total[5m]))"),
                ],
            },
            {
                "name": "fsdptrace-alerts",
                "rules": [
                    alert("FSDPNoProgress", f"max by ({BY_RANK}) (fsdp_last_event_age_seconds) > 300", "critical",
                          "rank {{ $labels.dl_rank }} of {{ $labels.fsdptrace_run_id }} has stood still for 5 minutes",
                          "FSDP2 has done nothing in this process since. Where every rank stands: fsdptrace report on its files."),
                    alert("FSDPViolation",
                          'sum by (fsdptrace_run_id, fsdp_rule) (fsdp_violations_total{fsdp_severity="error"}) > 0', "critical",
                          "{{ $labels.fsdp_rule }} in {{ $labels.fsdptrace_run_id }}: {{ $value }} times",
                          "What it means and what to change: fsdptrace rules {{ $labels.fsdp_rule }}; where: fsdptrace report."),
                    alert("FSDPHeldPastBackward", f"max by ({BY_RANK}) (fsdp_unsharded_past_backward_bytes) > 0", "warning",
                          "rank {{ $labels.dl_rank }} of {{ $labels.fsdptrace_run_id }} ends its steps with "
                          "{{ $value | humanize1024 }}B gathered past their backward",
                          "Nobody will use these parameters before they change. The units: fsdptrace report."),
                    alert("FSDPRankBehind",
                          "quantile by (fsdptrace_run_id) (0.5, fsdp_step) - on (fsdptrace_run_id) group_right "
                          f"max by ({BY_RANK}) (fsdp_step) >= 1", "warning",
                          "rank {{ $labels.dl_rank }} of {{ $labels.fsdptrace_run_id }} is {{ $value }} steps behind the median",
                          "Slow, or on its way to a hang of all ranks.", "2m"),
                    alert("FSDPTraceDropped", "sum by (fsdptrace_run_id, fsdptrace_where) (fsdptrace_dropped_total) > 0", "warning",
                          "{{ $value }} events of {{ $labels.fsdptrace_run_id }} are lost ({{ $labels.fsdptrace_where }})",
                          "recorder: memory was short; files: max_bytes; exporter: the back end refused them."),
                ],
            },
        ]
    }  # fmt: skip


NOTE = "# Written by dashboards/generate.py; change it there.\n"


def files() -> dict[Path, str]:
    """What should lie here."""
    out = {}
    for made in (overview(), units(), step_traces()):
        data = json.loads(JSONEncoder(indent=2, sort_keys=True).encode(made.build()))
        for variable in data["templating"]["list"]:  # of interval variables, but the SDK gives them to all
            for name in ("auto", "auto_count", "auto_min"):
                variable.pop(name, None)
        for number, panel in enumerate(data["panels"], 1):
            panel["id"] = number
        out[HERE / "grafana" / f"{data['uid']}.json"] = json.dumps(data, indent=1, sort_keys=True) + "\n"
    out[HERE / "prometheus" / "fsdptrace.rules.yml"] = NOTE + yaml.safe_dump(rules(), sort_keys=False, width=140)
    return out


def main() -> int:
    """Entry point."""
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if "--write" in sys.argv:
        for path, text in files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return 0
    for path in stale:
        print(f"{path.relative_to(HERE.parent)} is out of date: python dashboards/generate.py --write")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())

// One run: where it stands, any metric, what each step's time went to, and why it waits. Follows a live run.

import { get, link } from "../api.js";
import { bar, colour, legend, lines, REWARDS, stacked } from "../charts.js";
import { busy, empty, h, mean, number, panel, plural, redraw, roving, seconds, tip, visible } from "../dom.js";
import { command, csv, facts, fileName, isLive, listed, nameField, outside, scored, stateChip, stepOf, range } from "./parts.js";

const SHOWN = ["actor/entropy", "actor/grad_norm", "response_length/mean", "timing_s/step"];
const LOSSES = [[["train/loss", "training"], ["val/loss", "validation"]], [["actor/loss_sum", "sum over tokens"]]];
/** Metrics and names of the losses of supervised training, and of a loop over Tinker's API, which keeps its rewards. */
const lossesOf = (metrics) => LOSSES.find(([[first]]) => first in metrics);
const IDLE = { "learner, waiting for rollouts": "fully_async/trainer/idle_ratio", "no rollout runs": "fully_async/rollouter/idle_ratio" };
const MOST_CHOSEN = 8;
const MOST_STEPS = 400;
const PASS_RATE = /^val-aux\/(.+)\/acc\/(pass@(\d+))$/;
const MOST_RATES = 8;
const STATES = { used: "good", running: "live", finished: "ready", submitted: "", baseline: "", cancelled: "idle" };

export default async function run(visit) {
  const { run: key } = visit.parameters;
  const first = await get("run", { run: key }, { signal: visit.signal });
  const root = h("div", { class: "stack" });
  let metrics = listed(visit.parameters.metrics).slice(0, MOST_CHOSEN);
  let page = first.body;

  const draw = async () => {
    const phases = phaseNames(page.metrics);
    const chosen = metrics.length ? metrics : SHOWN.filter((name) => name in page.metrics);
    const rates = passRates(page.metrics);
    const names = [...new Set([...chosen, ...phases, ...rates.map(({ metric }) => metric), "timing_s/step", ...LOSSES.flat().map(([metric]) => metric), ...Object.values(IDLE)])];
    const { series } = await visit.get("metrics", { run: key, name: names });
    const losses = lossesOf(page.metrics);
    redraw(root, page.evaluation ? [head(page), evaluated(page), stepsPanel(page, key)] : [
      head(page), waits(page), cards(page, series),
      h("div", { class: "two" },
        losses ? panel("Loss", { aside: legend(losses.map(([, name], index) => ({ name, kind: `s${index}` }))) },
          lines({ series: losses.map(([metric], index) => ({ name: metric, ...series[metric], points: index > 0 })), height: 300, pick: opens(key, page) })) : panel("Reward and accuracy", { aside: legend([{ name: "mean reward", kind: "s0" }, { name: "validation accuracy", kind: "s1" }]) },
          lines({ series: [{ name: "reward", ...page.summary.reward }, { name: "accuracy", ...page.summary.accuracy, points: true }], height: 300, span: REWARDS, pick: opens(key, page) })),
        timePanel(page, series, phases, key)),
      rates.length > 0 && panel("pass@k of validations", { aside: legend(rates.map(({ name, metric }, index) => ({ name, kind: `s${index}`, value: number(page.metrics[metric]) }))) },
        lines({ series: rates.map(({ name, metric }) => ({ name, ...series[metric] })), height: 150, span: REWARDS, label: "pass@k", pick: opens(key, page) })),
      stepsPanel(page, key),
      metricsPanel(page, series, chosen, key, (next) => {
        metrics = next;
        history.replaceState(null, "", link("run", { run: key, metrics: next.join(",") }));
        busy(draw());
      }),
      account(page),
    ]);
  };
  await draw();
  visit.follow("run", { run: key }, async (body) => {
    page = body;
    await draw();
  }, { tag: first.tag });
  return root;
}

/** The pass@k that validations report, by k, with the data source where there are several. */
function passRates(metrics) {
  const found = Object.keys(metrics).map((name) => name.match(PASS_RATE)).filter(Boolean).sort((a, b) => a[1].localeCompare(b[1]) || a[3] - b[3]);
  const isOne = new Set(found.map(([, source]) => source)).size === 1;
  return found.slice(0, MOST_RATES).map(([metric, source, rate]) => ({ metric, name: isOne ? rate : `${source} ${rate}` }));
}

/** What an evaluation found, and the way to its rows. */
function evaluated({ evaluation, summary: { key }, folder }) {
  const { summary, model, n, temperature, files } = evaluation;
  const value = (found) => found && `${number(found.value, 3)}${found.std_err === null ? "" : ` ± ${number(found.std_err, 2)}`}`;
  const rates = (name, found, least = 2) => Object.entries(found ?? {}).filter(([k]) => k >= least).map(([k, rate]) => [`${name}${k}`, value(rate)]);
  return panel("Evaluation", { aside: h("a", { class: "button", href: link("evaluations", { run: key }) }, "Row by row, beside others") }, facts([
    ["model", model], ["rows", `${number(evaluation.rows)} of ${files.join(", ")}`], ["rollouts of each", `${number(n)} at temperature ${number(temperature)}`],
    ["score", value(summary?.score)], ...rates("pass@", summary?.pass_at, 1), ...rates("pass^", summary?.pass_all), ...rates("majority@", summary?.majority_at),
    ["failed, in no figure", number(summary?.failed ?? null)], ["folder", folder]]));
}

function head({ summary, folder, mlflow, weave, evaluation }) {
  const title = h("div", { class: "title" }, h("h1", {}, visible(summary.key)), stateChip(summary), h("span", { class: "spacer" }),
    h("a", { class: "button", href: link("config", { run: summary.key }) }, "Configuration"), mlflow && outside(mlflow, "Traces in MLflow"), weave && outside(weave, "Traces in Weave"));
  if (evaluation) return title;
  const done = summary.total_steps ? summary.step / summary.total_steps : 0;
  return h("div", {},
    title,
    summary.total_steps > 0 && h("div", { class: "meter", role: "progressbar", "aria-valuenow": summary.step, "aria-valuemax": summary.total_steps, "aria-label": "Steps" }, h("i", { style: { width: `${Math.min(100, done * 100)}%` } })),
    h("p", { class: "dim" }, `step ${stepOf(summary, " of ")}`,
      summary.restarts > 0 && ` · ${plural(summary.restarts, "restart")}`,
      summary.policy && [" · policy ", h("code", {}, visible(summary.policy))], " · ", h("code", {}, visible(folder))),
    summary.message && h("p", { class: summary.state === "failed" || summary.state === "unreadable" ? "note bad" : "note" }, visible(summary.message)),
    summary.alive === false && h("p", { class: "note bad" }, "Its process is gone and wrote no end. Its log, and how to go on: ",
      command(`trackway runs logs ${words(summary.name, folder)}`), " ", command(`trackway train --resume ${words(summary.name, folder)}`)));
}

/** The run and its outputs folder as words of a command. */
const words = (name, folder) => [name, "--outputs", folder.slice(0, folder.lastIndexOf("/"))]
  .map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`)).join(" ");

function waits({ waits: list, summary }) {
  if (!isLive(summary) || !list.length) return null;
  const item = (wait) => h("li", {}, h("b", {}, visible(wait.who)), " waits for ", h("b", {}, visible(wait.waits_for)),
    h("span", { class: "dim" }, ` · ${seconds((Date.now() - wait.since) / 1000)}`, wait.until && ` of at most ${seconds((wait.until - wait.since) / 1000)}`),
    wait.progress && h("div", {}, visible(wait.progress)), wait.because.length > 0 && h("ul", {}, wait.because.map(item)));
  return panel("Why it waits", { class: "warn" }, h("ul", { class: "waits" }, list.map(item)));
}

function cards({ summary, metrics }, series) {
  const losses = lossesOf(metrics);
  const last = (values) => values.filter((value) => value !== null).at(-1);
  const accuracy = summary.accuracy.values.filter((value) => value !== null);
  const card = (name, value, note, kind = "") => h("div", { class: `card ${kind}` }, h("span", {}, name), h("b", {}, value), h("small", {}, note ?? ""));
  return h("div", { class: "cards" },
    losses?.map(([name]) => card(name.startsWith("val") ? "validation loss" : "loss", number(metrics[name] ?? null), name in metrics ? "the newest" : "not measured")),
    !losses && card("mean reward", number(last(summary.reward.values)), summary.reward.steps.length ? `step ${number(summary.reward.steps[0])}: ${number(summary.reward.values[0])}` : "no step yet"),
    !losses && card("accuracy", number(last(accuracy)), accuracy.length > 1 ? `before: ${number(accuracy[0])}` : accuracy.length ? "measured once" : "not measured"),
    card("a step takes", seconds(mean(series["timing_s/step"]?.values ?? [])), `${seconds(summary.seconds)} so far`),
    card("tokens per second", number(metrics["perf/throughput"] ?? null), summary.tokens === null ? "trained and prompt tokens" : `${number(summary.tokens)} tokens so far`),
    summary.gpu_seconds !== null && card("GPU time", seconds(summary.gpu_seconds), "of the GPUs of its configuration"),
    !losses && card("staleness", number(metrics["training/off_policy/trajectory_staleness/mean"] ?? null), "weight versions, mean"),
    !losses && card("failed rollouts", number(summary.failed), "ended by an error", summary.failed ? "bad" : ""));
}

const opens = (key, page) => (step) => {
  const file = page.files.find((other) => other.step === step && !other.validation) ?? page.files.find((other) => other.step === step);
  if (file) location.hash = link("step", { run: key, step, val: file.validation });
};

const phaseNames = (metrics) => Object.keys(metrics).filter((name) => /^timing_s\/[^/]+$/.test(name) && name !== "timing_s/step");

/** Seconds of each phase, and what no phase accounts for. Phases that overlap are as long together as they are. */
function timePanel(page, series, phases, key) {
  const steps = series["timing_s/step"]?.steps ?? [];
  const names = phases.map((name) => name.replace("timing_s/", ""));
  const at = (name, step) => {
    const line = series[name];
    const index = line?.steps.indexOf(step) ?? -1;
    return index < 0 ? 0 : line.values[index] ?? 0;
  };
  let overlaps = false;
  const rows = steps.slice(-MOST_STEPS).map((step) => {
    const parts = Object.fromEntries(phases.map((name, index) => [names[index], at(name, step)]));
    const sum = Object.values(parts).reduce((total, value) => total + value, 0);
    const whole = at("timing_s/step", step);
    overlaps ||= sum > whole * 1.02;
    return { step, parts: { ...parts, other: Math.max(0, whole - sum) } };
  });
  if (!rows.length) return panel("Seconds of each step", {}, empty("No step has ended yet.", "Its phases appear here after the first step."));
  const stack = [...names, "other"].filter((name) => rows.some((row) => row.parts[name] > 0));
  const idleShares = idle(series, key, page);
  return panel("Seconds of each step", { aside: legend(stack.map((name) => ({ name, kind: colour(name) }))) },
    stacked({ rows, names: stack, height: idleShares ? 170 : 300, unit: seconds, pick: opens(key, page) }),
    idleShares,
    overlaps && h("p", { class: "dim small" }, "Phases of this run overlap: a column can be longer than its step."));
}

/** The share of each step in which a side of the run did nothing. */
function idle(series, key, page) {
  const found = Object.entries(IDLE).filter(([, name]) => series[name]?.values.some((value) => value !== null));
  if (!found.length) return null;
  return h("figure", {}, h("figcaption", {}, h("span", {}, "idle share of each step"), legend(found.map(([name], index) => ({ name, kind: `s${index}` })))),
    lines({ series: found.map(([name, metric]) => ({ name, ...series[metric] })), height: 110, label: "idle share", pick: opens(key, page) }));
}

function stepsPanel(page, key) {
  if (!page.files.length) return panel("Steps", {}, empty("No trajectories are written yet.", "They appear after the first step, or after the first validation."));
  const reward = new Map(page.summary.reward.steps.map((step, index) => [step, page.summary.reward.values[index]]));
  const accuracy = new Map(page.summary.accuracy.steps.map((step, index) => [step, page.summary.accuracy.values[index]]));
  const scale = range([...reward.values()]);
  const link_ = (file) => {
    const score = (file.validation ? accuracy : reward).get(file.step) ?? null;
    const words = `${file.validation ? "validation after " : ""}step ${file.step}${score === null ? "" : `, ${file.validation ? "accuracy" : "mean reward"} ${number(score)}`}`;
    return tip(h("a", { class: `cell wide ${scored(score, scale).class} ${file.validation ? "validation" : ""}`, style: { "--share": scored(score, scale).share }, href: link("step", { run: key, step: file.step, val: file.validation }), "aria-label": words }, `${file.validation ? "v" : ""}${file.step}`), words);
  };
  return panel("Steps", { aside: reward.size + accuracy.size > 0 && h("span", { class: "dim small" }, "coloured by mean reward; v: validation") },
    roving(h("div", { class: "cells steps" }, page.files.map(link_)), "a.cell"));
}

function metricsPanel(page, series, chosen, key, choose) {
  return panel("Metrics", { aside: h("span", { class: "row" }, nameField("metric", "add a metric: actor/…, timing_s/…", Object.keys(page.metrics), chosen, (name) => choose([...chosen, name].slice(-MOST_CHOSEN))),
    chosen.length > 0 && csv(`${fileName(key)}-metrics`, ["step", ...chosen], () => table(chosen.map((name) => series[name])))) },
    h("div", { class: "small-charts" }, chosen.map((name) => h("figure", {},
      h("figcaption", {}, h("span", { class: "clip", title: name }, visible(name)), h("b", {}, number(page.metrics[name])),
        h("button", { type: "button", class: "plain", "aria-label": `remove ${name}`, onclick: () => choose(chosen.filter((other) => other !== name)) }, "×")),
      lines({ series: [{ name, ...(series[name] ?? { steps: [], values: [] }) }], height: 120, pick: opens(key, page) })))));
}

/** A row for each step that one of the series has. */
function table(every) {
  const steps = [...new Set(every.flatMap((line) => line?.steps ?? []))].sort((a, b) => a - b);
  const values = every.map((line) => new Map(line?.steps.map((step, index) => [step, line.values[index]])));
  return steps.map((step) => [step, ...values.map((line) => line.get(step))]);
}

function account({ rollouts, traces, tracking }) {
  const states = Object.entries(rollouts).filter(([name, count]) => name !== "submitted" && count > 0);
  if (!states.length) return null;
  const parts = states.map(([name, value]) => ({ name: name.replaceAll("_", " "), value, kind: STATES[name] ?? "bad" }));
  return h("div", { class: "two" },
    panel("Rollouts", { aside: h("span", { class: "dim small" }, `${number(rollouts.submitted ?? 0)} submitted`) }, bar(parts),
      legend(parts.map((part) => ({ name: part.name, kind: part.kind, value: number(part.value) })))),
    panel("Traces and trackers", {}, facts([
      ["traced", traces ? plural(traces.trajectories, "trajectory").replace("trajectorys", "trajectories") : "not traced"],
      traces && ["spans lost", number(traces.spans_dropped + traces.spans_refused)],
      traces && ["spans waiting", number(traces.spans_waiting)],
      ...tracking.map((backend) => [backend.backend, `${number(backend.rows_waiting + backend.feedback_waiting)} waiting, ${number(backend.metrics_lost + backend.feedback_lost)} lost${backend.waits_for ? `: ${backend.waits_for}` : ""}`]),
    ])));
}

// The planner's page. Everything shown was said by strangers: it goes into text nodes only, never into markup.
"use strict";

const POLL_MS = 2000;
const byId = (id) => document.getElementById(id);
let ticket = "";
let latest = null;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function seconds(value) {
  if (value < 10) return value.toFixed(1) + " s";
  if (value < 120) return value.toFixed(0) + " s";
  return value < 7200 ? (value / 60).toFixed(0) + " min" : (value / 3600).toFixed(0) + " h";
}

function fill(id, rows, nothing) {
  const body = byId(id);
  body.replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    for (const cell of cells) {
      row.append(Array.isArray(cell) ? element("td", cell[0], cell[1]) : element("td", cell));
    }
    return row;
  }));
  if (!rows.length) {
    const cell = element("td", nothing, "none");
    cell.colSpan = 10;
    const row = element("tr");
    row.append(cell);
    body.append(row);
  }
}

function remarks(inst) {
  const found = [];
  if (inst.set_aside_s) found.push("set aside for " + seconds(inst.set_aside_s));
  if (inst.drain_asked) found.push("asked to drain");
  if (inst.ranks_ready < inst.ranks) found.push("not every rank answers");
  return found.join(", ");
}

function showInstances() {
  const wanted = byId("filter").value.toLowerCase();
  const shown = latest.instances.filter((inst) =>
    [inst.instance_id, inst.instance_key, inst.model, inst.state].some((text) => text.toLowerCase().includes(wanted)));
  fill("instances", shown.map((inst) => [
    inst.instance_id,
    [inst.state, ["starting", "serving", "paused", "draining"].includes(inst.state) ? inst.state : ""],
    String(inst.generation),
    inst.num_leases + "/" + inst.capacity,
    inst.ranks_ready + "/" + inst.ranks,
    [inst.instance_key.slice(0, 12), "mono"],
    inst.model,
    [inst.parent, "mono"],
    seconds(inst.heartbeat_age_s) + " ago",
    [remarks(inst), "bad"],
  ]), "no instance is registered");
}

function showTree() {
  const known = new Map(latest.instances.map((inst) => [inst.instance_id, inst]));
  const children = new Map();
  for (const inst of latest.instances) {
    const parent = known.has(inst.parent) && inst.parent !== inst.instance_id ? inst.parent : "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(inst);
  }
  const drawn = new Set();
  const branch = (parent) => {
    const list = element("ul");
    for (const inst of children.get(parent) || []) {
      if (drawn.has(inst.instance_id)) continue;
      drawn.add(inst.instance_id);
      const origin = !parent && inst.parent ? "  ← " + inst.parent : "";
      const item = element("li", inst.instance_id + " gen " + inst.generation + origin);
      if ((children.get(inst.instance_id) || []).length) item.append(branch(inst.instance_id));
      list.append(item);
    }
    return list;
  };
  byId("tree").replaceChildren(branch(""));
}

function show(view) {
  latest = view;
  byId("planner").textContent =
    view.planner + " · up " + seconds(view.uptime_s) + " · store " + view.store;
  byId("planner").className = "";
  byId("totals").replaceChildren(...Object.entries(view.totals).map(([name, count]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", String(count)));
    return pair;
  }));
  showInstances();
  showTree();
  fill("leases", view.leases.map((line) => [
    line.client, [line.seed, "mono"], line.granted ? "granted" : "reserved", seconds(line.age_s), seconds(line.ttl_s),
  ]), "nobody reads");
  fill("waiting", view.waiting.map((line) => [
    line.client, [line.instance_key.slice(0, 12), "mono"],
    line.claim ? "reads the disk" : seconds(line.waited_s), line.claim ? "" : seconds(line.bound_s),
  ]), "nobody waits");
  fill("failures", view.failures.slice().reverse().map((event) => [
    seconds(event.age_s) + " ago", [event.client || "", "mono"], [event.instance || "", "mono"], event.text || "",
  ]), "none");
}

async function refresh() {
  try {
    const headers = ticket ? { authorization: ticket } : {};
    const reply = await fetch("rfork/v1/overview", { headers, signal: AbortSignal.timeout(5000) });
    byId("ticket-form").hidden = reply.status !== 401;
    if (!reply.ok) throw new Error(reply.status === 401 ? "this fleet has a key: a ticket is needed" : "HTTP " + reply.status);
    show(await reply.json());
  } catch (error) {
    byId("planner").textContent = "no answer: " + error.message;
    byId("planner").className = "lost";
  }
  setTimeout(refresh, document.hidden ? 5 * POLL_MS : POLL_MS);
}

document.addEventListener("DOMContentLoaded", () => {
  byId("filter").addEventListener("input", () => latest && showInstances());
  byId("ticket-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ticket = byId("ticket").value.trim();
  });
  refresh();
});


// Keys are text that callers choose: it goes into the page by textContent only.
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const [time, status, subject, policySelect, keyInput, dialog, question, stores, policies] = [
  "time", "status", "subject", "policy", "key", "confirm", "question", "stores", "policies",
].map((id) => document.getElementById(id));

const base = location.pathname.replace(/\/+$/, "");
let report;
let shown; // The subject whose counts are shown.

async function call(path, options = {}) {
  const response = await fetch(base + path, { cache: "no-store", ...options });
  const isJson = response.headers.get("content-type")?.startsWith("application/json");
  const body = isJson ? await response.json() : {};
  if (!response.ok || !isJson) {
    throw new Error(body.error ?? `${response.status} ${response.statusText}`);
  }
  return body;
}

function post(path, body) {
  const headers = { "content-type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body) });
}

function showStatus(text, isError = false) {
  status.textContent = text;
  status.classList.toggle("error", isError);
}

// Runs a task, and shows its error.
async function attempt(task) {
  try {
    await task();
  } catch (error) {
    showStatus(error.message, true);
  }
}

const date = (seconds) => new Date(seconds * 1000).toLocaleString();

function duration(seconds) {
  if (seconds > 0 && seconds < 1) {
    return `${Number((seconds * 1000).toPrecision(2))} ms`;
  }
  const whole = Math.ceil(seconds);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  return parts.filter(([number]) => number > 0).slice(0, 2).map((part) => part.join(" ")).join(" ") || "0 s";
}

function times(number) {
  return number === 1 ? "once" : `${number.toLocaleString()} times`;
}

// A list of terms, without those that have no value.
function terms(entries) {
  const present = entries.filter(([, value]) => value !== null && value !== undefined);
  const children = present.flatMap(([term, value]) => [
    element("dt", { textContent: term }),
    element("dd", { textContent: value }),
  ]);
  return element("dl", {}, ...children);
}

function top(title, state, kind = "") {
  return element("div", { className: "top" },
    element("h3", { textContent: title }),
    element("span", { className: `state ${kind}`, textContent: state }),
  );
}

function storeCard({ store, kind, numbers, replied_after_seconds: replied, error, health, nodes }) {
  const title = report.stores.length > 1 ? `Store ${store}: ${kind}` : kind;
  let state = ["no limit is counted", "none"];
  if (error) {
    state = ["does not reply", "bad"];
  } else if (nodes.some((node) => node.state !== "ok")) {
    state = [nodes.some((node) => node.state === "down") ? "down" : "degraded", "bad"];
  } else if (replied !== null) {
    state = ["replies"];
  }
  return element("article", {}, top(title, ...state), terms([
    ["Reply after", replied === null ? null : duration(replied)],
    ["Error", error],
    ["Health", health],
    ...nodes.filter((node) => node.failed > 0 || node.state !== "ok").map(nodeTerm),
    ...numbers.map(([name, number]) => [name[0].toUpperCase() + name.slice(1), number.toLocaleString()]),
  ]));
}

function nodeTerm({ node, state, since, decided, failed, failed_by_key: byKey, error }) {
  const parts = [
    since ? `${state} since ${date(since)}` : state,
    `${failed.toLocaleString()} of ${(decided + failed).toLocaleString()} checks failed in the last minute`,
    byKey > 0 ? `${byKey.toLocaleString()} by their keys` : null,
    error,
  ];
  return [node ?? "No node", parts.filter((part) => part !== null).join("; ")];
}

function policyCard(policy) {
  const { limit, limits, denials } = policy;
  const many = report.stores.length > 1;
  const known = limits.map((known) => known.limit).join(", ");
  const subjects = denials.subjects.map((denied) => subjectRow(policy, denied));
  const list = subjects.length > 0 ? [
    element("h4", { textContent: policy.observed ? "Would be denied most often" : "Denied most often" }),
    element("ol", { tabIndex: 0, ariaLabel: `Subjects that ${policy.policy} denies most often` }, ...subjects),
  ] : [];
  return element("article", {},
    top(
      policy.plan ? `${policy.policy} (${policy.plan})` : policy.policy,
      policy.observed ? "observes only" : policy.enforced_share < 1 ? `enforced for ${policy.enforced_share * 100} % of the keys` : "enforced",
      policy.observed ? "none" : "",
    ),
    terms([
      ["Limit", limit ?? `chosen for each request${known && ": "}${known}`],
      ["Window", limit && limits[0]?.window_seconds ? duration(limits[0].window_seconds) : null],
      ["Cost", policy.cost === null ? "computed" : policy.cost === 1 ? null : policy.cost],
      ["Bans", policy.ban],
      ["If the store fails", policy.failure_mode],
      ["Store", many ? policy.store : null],
      ["Running since", date(policy.since)],
      ["Reloaded", policy.reloaded_at && date(policy.reloaded_at)],
      ["Not reloaded", policy.refused_reload && `${date(policy.refused_reload.since)}: ${policy.refused_reload.error}`],
      [policy.observed ? "Would deny" : "Denials", denials.since && `${denials.total.toLocaleString()} since ${date(denials.since)}`],
    ]),
    ...list,
  );
}

// A policy of a file that no layer or limiter has.
function unusedCard(name) {
  return element("article", {}, top(name, "not used by any layer or limiter", "bad"));
}

function subjectRow(policy, { subject: name, denials, error }) {
  const share = element("div", { className: "share" });
  share.style.width = `${(100 * denials) / policy.denials.subjects[0].denials}%`;
  const label = report.shows_keys
    ? element("button", { type: "button", textContent: name, title: "Look up", onclick: () => select(policy, name) })
    : element("code", { textContent: name });
  const count = error > 0 ? `${(denials - error).toLocaleString()} to ${denials.toLocaleString()}` : denials.toLocaleString();
  const isFound = shown?.policy === policy.policy && shown.store === policy.store && shown.subject === name;
  return element("li", { className: isFound ? "found" : "" }, share, label, element("span", { textContent: count }));
}

function countBlock({ limit, allowed, denial, quota, remaining, retry_after_seconds: wait, reset_after_seconds: reset, observed, store_error: error }) {
  const inner = element("div");
  inner.style.width = `${quota === null ? 0 : 100 - (100 * remaining) / Math.max(quota, 1)}%`;
  const state = allowed ? "admits" : observed ? `would deny: ${denial}` : `denies: ${denial}`;
  return element("div", { className: "count" },
    top(limit, state, allowed ? "" : "bad"),
    element("div", { className: allowed ? "bar" : "bar bad-bar", ariaHidden: "true" }, inner),
    terms([
      ["Remaining", quota === null ? "unlimited" : `${remaining.toLocaleString()} of ${quota.toLocaleString()}`],
      ["Admitted after", wait === null ? null : duration(wait)],
      ["Full quota after", reset > 0 ? duration(reset) : null],
      ["Counted in this process", error],
    ]),
  );
}

function draw() {
  const { stores: all } = report;
  time.textContent = `as of ${date(report.now)}`;
  stores.replaceChildren(...all.map(storeCard));
  policies.replaceChildren(...report.policies.map(policyCard), ...report.unused_policies.map(unusedCard));

  const selected = policySelect.value;
  const choices = new Map(report.policies.map(({ policy, store }) => [JSON.stringify([policy, store]), { policy, store }]));
  const options = [...choices].map(([value, { policy, store }]) => {
    return element("option", { value, textContent: all.length > 1 ? `${policy} (store ${store})` : policy });
  });
  policySelect.replaceChildren(...options);
  if (choices.has(selected)) {
    policySelect.value = selected;
  }

  subject.hidden = !shown;
  if (shown) {
    const { policy, key, subject: name, denied, counts } = shown;
    const listed = denied
      ? `${denied.error > 0 ? "at most " : ""}${times(denied.denials)}${report.shows_keys ? "" : `, listed as ${name}`}`
      : `not listed${report.shows_keys ? "" : `; its hash is ${name}`}`;
    subject.replaceChildren(
      top(key, policy, "none"),
      terms([["Denied", listed]]),
      ...(counts.length > 0 ? counts.map(countBlock) : [element("p", { textContent: "No limit was chosen for a request in this process yet." })]),
      element("div", { className: "buttons" },
        element("button", { type: "button", textContent: "Reset its counts and bans", onclick: confirm })),
    );
  }
}

async function load() {
  report = await call("/report");
  draw();
}

async function lookUp(policy, store, key) {
  shown = await post("/subject", { policy, store, key });
  await load();
  const denies = shown.counts.some((counts) => !counts.allowed && !counts.observed);
  showStatus(`${shown.policy} ${denies ? "denies" : "admits"} ${shown.key}.`);
}

function select({ policy, store }, key) {
  policySelect.value = JSON.stringify([policy, store]);
  keyInput.value = key;
  attempt(async () => {
    await lookUp(policy, store, key);
    subject.focus();
  });
}

function confirm() {
  question.textContent = `Remove all counts and bans of ${shown.key} in ${shown.policy}?`;
  dialog.showModal();
}

document.getElementById("look-up").addEventListener("submit", (event) => {
  event.preventDefault();
  const [policy, store] = JSON.parse(policySelect.value);
  attempt(() => lookUp(policy, store, keyInput.value));
});

document.getElementById("refresh").addEventListener("click", () => {
  attempt(async () => {
    const { policy, store, key } = shown ?? {};
    await (shown ? lookUp(policy, store, key) : load());
    showStatus("Refreshed.");
  });
});

document.getElementById("cancel").addEventListener("click", () => dialog.close());

document.getElementById("reset").addEventListener("click", () => {
  dialog.close();
  attempt(async () => {
    const { policy, store, key } = shown;
    shown = await post("/reset", { policy, store, key });
    await load();
    showStatus(`The counts of ${key} in ${policy} are reset.`);
    subject.focus();
  });
});

attempt(async () => {
  await load();
  showStatus(report.policies.length > 0 ? "Ready." : "No layer or limiter was added.");
});

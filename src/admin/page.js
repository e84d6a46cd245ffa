
// Keys are text that callers choose: it goes into the page by textContent only.
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const [time, status, subject, policySelect, keyInput, dialog, question, stores, overrides, hashes, policies] = [
  "time", "status", "subject", "policy", "key", "confirm", "question", "stores", "overrides", "hashes", "policies",
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
  const count = error > 0 ? `${(denials - error).toLocaleString()} to ${denials.toLocaleString()}` : denials.toLocaleString();
  const isFound = shown?.policy === policy.policy && shown.store === policy.store && shown.subject === name;
  return element("li", { className: isFound ? "found" : "" }, share, subjectLabel(policy, name), element("span", { textContent: count }));
}

// The name of a subject, which looks it up if it is a key.
function subjectLabel(policy, name) {
  return report.shows_keys && !name.startsWith("keyed=")
    ? element("button", { type: "button", className: "look-up", textContent: name, title: "Look up", onclick: () => select(policy, name) })
    : element("code", { textContent: name });
}

function overrideRow({ policy, store, subject: name, limit, ends_after_seconds: ends }) {
  const own = shown?.override;
  const isFound = own?.policy === policy && own.store === store && own.subject === name;
  return element("tr", { className: isFound ? "found" : "" },
    element("td", { textContent: report.stores.length > 1 ? `${policy} (store ${store})` : policy }),
    element("td", {}, subjectLabel({ policy, store }, name)),
    element("td", { textContent: limit }),
    element("td", { textContent: duration(ends) }),
  );
}

// A form that gives the subject that is shown another limit.
function overrideForm() {
  const limit = element("input", { id: "limit", required: true, autocomplete: "off", autocapitalize: "none", spellcheck: false, placeholder: "sliding-log 50/d" });
  const lasts = element("input", { id: "lasts", required: true, autocomplete: "off", autocapitalize: "none", spellcheck: false, placeholder: "3d" });
  limit.value = shown.override?.limit ?? shown.counts[0]?.limit ?? "";
  const onsubmit = (event) => {
    event.preventDefault();
    change("/override", { limit: limit.value, lasts: lasts.value }, ({ policy, key, override: own }) => {
      return `${key} has the limit ${own.limit} in ${policy} for ${duration(own.ends_after_seconds)}.`;
    });
  };
  return element("form", { id: "override", ariaLabel: "Another limit for the subject", onsubmit },
    element("label", { className: "wide" }, "Another limit ", limit),
    element("label", {}, "For (3d, 12h, seconds) ", lasts),
    element("button", { type: "submit", textContent: shown.override ? "Replace the override" : "Override the limit" }),
  );
}

function endOverride() {
  change("/end-override", {}, ({ policy, key }) => `The override of ${key} in ${policy} has ended.`);
}

// Changes the subject that is shown, and shows it as it is then.
function change(path, settings, done) {
  return attempt(async () => {
    const { policy, store, key } = shown;
    shown = await post(path, { policy, store, key, ...settings });
    await load();
    showStatus(done(shown));
    subject.focus();
  });
}

function countBlock({ limit, in_place_of: own, allowed, denial, quota, remaining, retry_after_seconds: wait, reset_after_seconds: reset, observed, store_error: error }) {
  const inner = element("div");
  inner.style.width = `${quota === null ? 0 : 100 - (100 * remaining) / Math.max(quota, 1)}%`;
  const state = allowed ? "admits" : observed ? `would deny: ${denial}` : `denies: ${denial}`;
  return element("div", { className: "count" },
    top(limit, state, allowed ? "" : "bad"),
    element("div", { className: allowed ? "bar" : "bar bad-bar", ariaHidden: "true" }, inner),
    terms([
      ["In place of", own],
      ["Remaining", quota === null ? "unlimited" : `${remaining.toLocaleString()} of ${quota.toLocaleString()}`],
      ["Admitted after", wait === null ? null : duration(wait)],
      ["Full quota after", reset > 0 ? duration(reset) : null],
      ["Counted in this process", error],
    ]),
  );
}

function hashesText() {
  if (report.shows_keys) {
    return "";
  }
  return report.shares_hashes
    ? "Subjects are hashes of their keys, with the secret that was set: all instances that have it list the same."
    : `Subjects are hashes of their keys, with a secret of ${report.instance} alone: each instance lists others.`;
}

function draw() {
  const { stores: all } = report;
  time.textContent = `${report.instance}, as of ${date(report.now)}`;
  hashes.textContent = hashesText();
  stores.replaceChildren(...all.map(storeCard));
  overrides.hidden = report.overrides.length === 0;
  overrides.querySelector("tbody").replaceChildren(...report.overrides.map(overrideRow));
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
    const { instance, policy, key, subject: name, denied, override: own, counts } = shown;
    const listed = denied
      ? `${denied.error > 0 ? "at most " : ""}${times(denied.denials)} by ${instance}${report.shows_keys ? "" : `, listed as ${name}`}`
      : `not listed by ${instance}${report.shows_keys ? "" : `; its hash is ${name}`}`;
    subject.replaceChildren(
      top(key, policy, "none"),
      terms([
        ["Denied", listed],
        ["Override", own && `${own.limit} for ${duration(own.ends_after_seconds)}`],
      ]),
      ...(counts.length > 0 ? counts.map(countBlock) : [element("p", { textContent: "No limit was chosen for a request in this process yet." })]),
      element("div", { className: "buttons" },
        element("button", { type: "button", textContent: "Reset its counts and bans", onclick: confirm }),
        ...(own ? [element("button", { type: "button", id: "end-override", className: "quiet", textContent: "End the override", onclick: endOverride })] : [])),
      overrideForm(),
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
  change("/reset", {}, ({ policy, key }) => `The counts of ${key} in ${policy} are reset.`);
});

attempt(async () => {
  await load();
  showStatus(report.policies.length > 0 ? "Ready." : "No layer or limiter was added.");
});


// Keys are text that callers choose: it goes into the page by textContent only.
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const [time, status, found, subject, keyInput, dialog, question, stores, chart, holders, overrides, restOfOverrides, hashes, filter, sort, policies, refresh, auto] = [
  "time", "status", "found", "subject", "key", "confirm", "question", "stores", "chart", "holders", "overrides", "rest-of-overrides", "hashes", "filter", "sort", "policies", "refresh", "auto",
].map((id) => document.getElementById(id));

// Without the user and the password that the address of the page may have, with which `fetch` fails.
const base = location.origin + location.pathname.replace(/\/+$/, "");
const SUBJECTS = 50; // The most subjects of a policy that the page shows.
const OVERRIDES = 200; // The most overrides that the page shows.
const PAUSE = 5000; // Milliseconds between two refreshes.
const PATIENCE = 30_000; // Milliseconds until a request without a response is given up.
let report;
let latest = 0; // When the request of the report was sent.
let searched; // The last search: its text, and its result.
let shown; // The subject of the counts that are shown.
let asked; // The subject of the question that is asked.
let actions = 0; // How many actions of the operator have begun: what an earlier one receives is not shown any more.
let ended = 0; // How many of them have ended.
let reloads = 0; // How many times everything was loaded again.
let sentence; // Makes the status, while that is about counts that are shown.
let late = { text: "", isError: false }; // What changes have done after a later action had begun: it follows the status of that.

// Makes an element like a fresh one, and keeps what an operator has there: the focus, the text of inputs, and the scroll position.
function update(element, fresh) {
  for (const { name } of [...element.attributes]) {
    if (name !== "style" && !fresh.hasAttribute(name)) {
      element.removeAttribute(name);
    }
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && element.getAttribute(name) !== value) {
      element.setAttribute(name, value);
    }
  }
  if (fresh.style && element.style.cssText !== fresh.style.cssText) {
    element.style.cssText = fresh.style.cssText;
  }
  element.onclick = fresh.onclick;
  element.onsubmit = fresh.onsubmit;
  show(element, ...fresh.childNodes);
}

// Shows these children in an element, of which those that are of the same kind are updated.
function show(parent, ...children) {
  children.forEach((fresh, place) => {
    const child = parent.childNodes[place];
    if (child?.nodeName !== fresh.nodeName || child.dataset?.of !== fresh.dataset?.of) {
      if (child) {
        child.replaceWith(fresh);
      } else {
        parent.append(fresh);
      }
    } else if (fresh.nodeType === Node.TEXT_NODE) {
      if (child.data !== fresh.data) {
        child.data = fresh.data;
      }
    } else {
      update(child, fresh);
    }
  });
  while (parent.childNodes.length > children.length) {
    parent.lastChild.remove();
  }
}

async function call(path, options = {}) {
  const signal = AbortSignal.timeout(PATIENCE);
  try {
    const response = await fetch(base + path, { cache: "no-store", redirect: "manual", signal, ...options });
    const isJson = response.headers.get("content-type")?.startsWith("application/json");
    if (response.type === "opaqueredirect" || (response.ok && !isJson)) {
      throw new Error("the response is not of this router; sign in again and reload the page");
    }
    const body = isJson ? await response.json() : {};
    if (!response.ok) {
      throw new Error(body.error ?? `${response.status} ${response.statusText}`);
    }
    return body;
  } catch (error) {
    throw signal.aborted ? new Error(`no response within ${duration(PATIENCE / 1000)}`) : error;
  }
}

function post(path, body) {
  const headers = { "content-type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body) });
}

// Text with each word that is not ASCII apart: one from right to left does not move what is beside it, so each key looks different.
function words(text) {
  const parts = String(text).split(/((?:(?!\p{ASCII})[\p{L}\p{M}])+)/u);
  return parts.map((part, place) => (place % 2 === 1 ? element("bdi", { dir: "ltr", textContent: part }) : part));
}

function showStatus(text, isError = false) {
  status.replaceChildren(...words(text));
  status.classList.toggle("error", isError);
}

// Runs a task of the operator, and shows the status that it returns, or its error. If a later one has begun, its status stays, and what a
// change of this subject has done follows it. A refresh is none, and replaces no status of one.
async function attempt(task, { isRefresh = false, changed } = {}) {
  const action = isRefresh ? actions : ++actions;
  const [isLast, before] = [() => action === actions, ended];
  [sentence, late] = [undefined, { text: "", isError: false }];
  showStatus("Working.");
  let [text, isError] = ["", false];
  try {
    text = await task(isLast);
  } catch (error) {
    [text, isError] = [error.message, true];
  }
  if (isRefresh && before !== ended) {
    return;
  }
  ended += isRefresh ? 0 : 1;
  if (isLast()) {
    showStatus(text + late.text, isError || late.isError);
  } else if (changed) {
    const later = isError ? ` ${policyName(changed.policy, changed.store)}, ${changed.key}: ${text}` : ` ${text}`;
    late = { text: late.text + later, isError: isError || late.isError };
    showStatus(status.textContent + later, isError || status.classList.contains("error"));
  }
}

// Waits until the page is loaded. If that fails, what is done is shown all the same, so that it is not done again.
async function failureOfLoading(loading) {
  try {
    await loading;
    return "";
  } catch (error) {
    draw({ isLoaded: false });
    return ` The page is not refreshed: ${error.message}.`;
  }
}

const date = (seconds) => new Date(seconds * 1000).toLocaleString();

// The time of a moment today, or its date and time.
function moment(seconds) {
  const at = new Date(seconds * 1000);
  return at.toDateString() === new Date().toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
}

// The name of a key that a store has hashed: no hash of this page.
const isStoredHash = (name) => name.startsWith("keyed=");

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
    element("dd", {}, ...words(value)),
  ]);
  return element("dl", {}, ...children);
}

function top(title, state, kind = "") {
  return element("div", { className: "top" },
    element("h3", {}, ...words(title)),
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

function denialsText({ total, since }) {
  return since && `${total.toLocaleString()} since ${date(since)}`;
}

function policyCard(policy) {
  const { limit, limits, denials } = policy;
  const many = report.stores.length > 1;
  const known = limits.map((known) => known.limit).join(", ");
  const subjects = denials.subjects.map((denied) => subjectRow(policy, denied));
  const list = subjects.length > 0 ? [
    element("h4", { textContent: policy.observed ? "Would be denied most often" : "Denied most often" }),
    subjectList(policy, subjects),
  ] : [];
  const rest = denials.subjects.length === SUBJECTS ? [element("p", { className: "quiet-text", textContent: `The first ${SUBJECTS}. The report has all that are counted.` })] : [];
  return element("article", {},
    top(
      withPlan(policy.policy, policy.plan),
      policy.off ? "off" : policy.observed ? "observes only" : policy.enforced_share < 1 ? `enforced for ${Number((100 * policy.enforced_share).toFixed(7))} % of the keys` : "enforced",
      policy.off || policy.observed ? "none" : "",
    ),
    terms([
      ["Keys", policy.key],
      ["Limit", limit ?? `chosen for each request${known && ": "}${known}`],
      ["Error", policy.other_limit && `another layer or limiter has the name with ${policy.other_limit}`],
      ["Window", limit && limits[0]?.window_seconds ? duration(limits[0].window_seconds) : null],
      ["Cost", policy.cost === null ? "computed" : policy.cost === 1 ? null : policy.cost],
      ["Bans", policy.ban],
      ["Decisions", policy.decisions.toLocaleString()],
      ["Waiting requests", policy.waiting > 0 ? policy.waiting.toLocaleString() : null],
      ["If the store fails", policy.failure_mode],
      ["Store", many ? policy.store : null],
      ["Running since", date(policy.since)],
      ["Reloaded", policy.reloaded_at && date(policy.reloaded_at)],
      ["File", policy.missing ? "not in the file; keeps its last numbers" : null],
      ["Not reloaded", policy.refused_reload && `${date(policy.refused_reload.since)}: ${policy.refused_reload.error}`],
      [policy.observed ? "Would deny" : "Denials", denialsText(denials)],
    ]),
    ...list,
    ...rest,
  );
}

function subjectList({ policy, plan, store }, subjects) {
  const list = element("ol", { tabIndex: 0, ariaLabel: `Subjects that ${policy} denies most often` }, ...subjects);
  list.dataset.focus = JSON.stringify([policy, plan, store]);
  return list;
}

// A policy of a file that no layer or limiter has.
function unusedCard(name) {
  return element("article", {}, top(name, "not used by any layer or limiter", "bad"));
}

function subjectRow(policy, { subject: name, denials, error, last_at: last }) {
  const share = element("div", { className: "share" });
  share.style.width = `${(100 * denials) / policy.denials.subjects[0].denials}%`;
  const count = error > 0 ? `${(denials - error).toLocaleString()} to ${denials.toLocaleString()}` : denials.toLocaleString();
  const text = `${count}, last ${moment(last)}`;
  const isFound = shown?.policy === policy.policy && shown.store === policy.store && name === shown.subject;
  return element("li", { className: isFound ? "found" : "" }, share, subjectLabel(policy, name), element("span", { textContent: text }));
}

function lookUpButton({ policy, store }, key) {
  const button = element("button", { type: "button", className: "look-up", title: "Show", onclick: () => select({ policy, store }, key) }, ...words(key));
  button.dataset.focus = JSON.stringify([policy, store, key]);
  return button;
}

// The name of a subject, a key or its hash, which looks it up unless a store has hashed the key.
function subjectLabel(policy, name) {
  return isStoredHash(name) ? element("code", {}, name) : lookUpButton(policy, name);
}

// A row of a table, with a text or an element in each cell.
function tableRow(isFound, ...cells) {
  return element("tr", { className: isFound ? "found" : "" }, ...cells.map((cell) => element("td", {}, cell)));
}

// The layers and limiters that share a policy report the same subjects.
function holderRows() {
  const rows = new Map();
  for (const policy of report.policies) {
    const add = (kind, name, holds, time) => {
      const row = tableRow(false, policyName(policy.policy, policy.store), subjectLabel(policy, name), holds, time);
      rows.set(JSON.stringify([policy.policy, policy.store, kind, name]), row);
    };
    for (const { subject: name, slots: number, longest_seconds: longest } of policy.slots ?? []) {
      add("slots", name, number === 1 ? "1 slot" : `${number.toLocaleString()} slots`, `for ${duration(longest)}`);
    }
    for (const { subject: name, requests } of policy.lines) {
      add("line", name, requests === 1 ? "1 waiting request" : `${requests.toLocaleString()} waiting requests`, "");
    }
    for (const { subject: name, ends_at: ends, ends_after_seconds: rest } of policy.bans ?? []) {
      add("ban", name, "a ban", `until ${moment(ends)}, for ${duration(rest)}`);
    }
  }
  return [...rows.values()];
}

// The name of a policy, with its store if there are several, as far as a report has said that.
function policyName(policy, store) {
  return report?.stores.length > 1 ? `${policy} (store ${store})` : policy;
}

// The name of a policy with that of its plan, whose numbers are its own.
function withPlan(policy, plan) {
  return plan ? `${policy} (${plan})` : policy;
}

// What follows an override that is not in force.
function misfit({ applies }) {
  return applies ? "" : "; does not fit the limit of the policy, which applies";
}

function overrideRow({ policy, store, subject: name, limit, applies, ends_at: ends, ends_after_seconds: rest, set_by: by }) {
  const own = shown?.override;
  const isFound = own?.policy === policy && own.store === store && own.subject === name;
  const time = `${moment(ends)}, in ${duration(rest)}`;
  return tableRow(isFound, policyName(policy, store), subjectLabel({ policy, store }, name), `${limit}${misfit({ applies })}`, time, by ?? "the application");
}

// The texts of an end that a form takes: an error of the server is about the fields of its request.
const ENDS = "the end is not a length of time, or a time of the next 31 years; use one such as 3d, 12h, tomorrow, 2030-12-31 or 2030-12-31 18:00";

// When an override ends: after a length of time, or when a day begins where the operator is.
function endOf(text) {
  const until = (at) => {
    if (at <= Date.now()) {
      throw new Error("the end is over; use a later date");
    }
    return { until: Math.floor(at.getTime() / 1000) };
  };
  if (text.trim().toLowerCase() === "tomorrow") {
    return until(new Date(new Date().setHours(24, 0, 0, 0)));
  }
  const written = text.trim().match(/^(\d{4})-(\d\d)-(\d\d)(?:[T ]([01]\d|2[0-3]):([0-5]\d))?$/);
  const [year, month, day, ...time] = (written ?? []).slice(1).map((part) => Number(part ?? 0));
  const at = new Date(year, month - 1, day, ...time);
  // A month has no 31st day, or the text is no date.
  return at.getMonth() === month - 1 && at.getDate() === day ? until(at) : { lasts: text };
}

// A form that gives a subject another limit.
function overrideForm(of) {
  const limit = element("input", { id: "limit", required: true, autocomplete: "off", autocapitalize: "none", spellcheck: false, placeholder: "sliding-log 50/d" });
  const lasts = element("input", { id: "lasts", required: true, autocomplete: "off", autocapitalize: "none", spellcheck: false, placeholder: "3d, tomorrow or 2030-12-31" });
  limit.value = of.override?.limit ?? of.counts[0]?.limit ?? "";
  const onsubmit = (event) => {
    event.preventDefault();
    const [{ value: limit }, { value: lasts }] = event.target.elements;
    change(of, "/override", () => ({ limit, ...endOf(lasts) }), ({ policy, store, key, override: own }) => {
      return `${key} has the limit ${own.limit} in ${policyName(policy, store)} until ${date(own.ends_at)}.`;
    });
  };
  const form = element("form", { id: "override", ariaLabel: "Another limit for the subject", onsubmit },
    element("label", { className: "wide" }, "Another limit ", limit),
    element("label", {}, "For a time, or until a date ", lasts),
    element("button", { type: "submit", textContent: of.override ? "Replace the override" : "Override the limit" }),
  );
  // Inputs of another subject are others.
  form.dataset.of = JSON.stringify([of.policy, of.store, of.key]);
  return form;
}

function endOverride(of) {
  change(of, "/end-override", () => ({}), ({ policy, store, key }) => `The override of ${key} in ${policyName(policy, store)} has ended.`);
}

// Changes a subject, and shows it as it is then.
function change({ policy, store, key }, path, settings, done) {
  attempt(async (isLast) => {
    const changed = await post(path, { policy, store, key, ...settings() }).catch((error) => {
      throw /^`(lasts|until)` /.test(error.message) ? new Error(ENDS) : error;
    });
    if (isLast()) {
      shown = changed;
    }
    const failure = await failureOfLoading(reload());
    if (isLast()) {
      subject.focus();
    }
    return done(changed) + failure;
  }, { changed: { policy, store, key } });
}

function countBlock({ limit, in_place_of: own, allowed, denial, quota, remaining, banned_for_seconds: banned, retry_after_seconds: wait, reset_after_seconds: reset, observed, counted_locally: isLocal, store_error: error }) {
  const inner = element("div");
  inner.style.width = `${quota === null ? 0 : 100 - (100 * remaining) / Math.max(quota, 1)}%`;
  const state = allowed ? (error ? "not known: the store fails" : "admits") : observed ? `would deny: ${denial}` : `denies: ${denial}`;
  return element("div", { className: "count" },
    top(limit, state, allowed && !error ? "" : "bad"),
    element("div", { className: allowed ? "bar" : "bar bad-bar", ariaHidden: "true" }, inner),
    terms([
      ["In place of", own],
      ["Remaining", quota === null ? "unlimited" : `${remaining.toLocaleString()} of ${quota.toLocaleString()}`],
      ["Banned for", banned === null ? null : duration(banned)],
      ["Admitted after", wait === null ? null : duration(wait)],
      ["Full quota after", reset > 0 ? duration(reset) : null],
      [isLocal ? "Counted in this process" : "The store fails", error],
    ]),
  );
}

function hashesText() {
  if (report.shows_keys) {
    return "";
  }
  const secret = report.shares_hashes
    ? "as in the audit log and in all instances that have the secret"
    : `with a secret of ${report.instance} alone: each instance lists others`;
  const error = report.hashes_error ? ` The common secret could not be read: ${report.hashes_error}.` : "";
  return `Subjects are hashes of their keys, ${secret}.${error}`;
}

// The policies that the filter leaves, in the chosen order.
function selectedPolicies() {
  const text = filter.value.trim().toLowerCase();
  const has = (card) => {
    const { policy, plan, key, limit } = card;
    return [policy, plan, key, limit, ...card.denials.subjects.map((denied) => denied.subject)].some((part) => part?.toLowerCase().includes(text));
  };
  const orders = {
    denials: (one, other) => other.denials.total - one.denials.total,
    name: (one, other) => one.policy.localeCompare(other.policy),
    decisions: (one, other) => other.decisions - one.decisions,
  };
  return report.policies.filter(has).sort(orders[sort.value]);
}

function drawPolicies() {
  if (!report) {
    return;
  }
  const selected = selectedPolicies();
  const unused = filter.value.trim() ? [] : report.unused_policies;
  const none = selected.length + unused.length === 0 ? [element("p", { textContent: "No policy has this text." })] : [];
  show(policies, ...selected.map(policyCard), ...unused.map(unusedCard), ...none);
}

// Draws the report, and keeps the focus on what has it, wherever that is then.
function draw({ isLoaded }) {
  const { focus } = document.activeElement.dataset;
  const isInSubject = subject.contains(document.activeElement);
  if (isLoaded) {
    drawReport();
  }
  drawFound();
  drawSubject();
  if (focus && document.activeElement.dataset.focus !== focus) {
    const focused = [...document.querySelectorAll("[data-focus]")].find((element) => element.dataset.focus === focus);
    focused?.focus({ preventScroll: true });
  }
  if (isInSubject && !subject.contains(document.activeElement)) {
    subject.focus({ preventScroll: true });
  }
}

function drawReport() {
  time.textContent = `${report.instance}, as of ${date(report.now)}`;
  time.classList.remove("error");
  hashes.textContent = hashesText();
  show(stores, ...report.stores.map(storeCard));
  drawRows(holders, holderRows());
  drawRows(overrides, report.overrides.slice(0, OVERRIDES).map(overrideRow));
  restOfOverrides.hidden = report.overrides.length <= OVERRIDES;
  restOfOverrides.textContent = `The first ${OVERRIDES} of ${report.overrides.length.toLocaleString()}. The report has all of them.`;
  drawChart();
  drawPolicies();
}

function drawRows(section, rows) {
  section.hidden = rows.length === 0;
  // On a narrow screen, each cell has its head beside it.
  const heads = [...section.querySelectorAll("th")].map((head) => head.textContent);
  for (const row of rows) {
    row.setAttribute("role", "row");
    [...row.cells].forEach((cell, column) => {
      cell.dataset.head = heads[column];
      cell.setAttribute("role", "cell");
    });
  }
  show(section.querySelector("tbody"), ...rows);
}

function drawSubject() {
  subject.hidden = !shown;
  if (!shown) {
    return;
  }
  const of = shown; // What the buttons change, whatever is shown by then.
  const { instance, policy, store, key, subject: name, denied, override: own, counts, error } = of;
  const text = denied
    ? `${denied.error > 0 ? "at most " : ""}${times(denied.denials)} by ${instance}, last ${moment(denied.last_at)}${name === key ? "" : `, listed as ${name}`}`
    : `not listed by ${instance}${name === key ? "" : `; its hash is ${name}`}`;
  show(subject,
    top(key, policyName(policy, store), "none"),
    // What comes and goes is in an element that stays, so that the form stays, with what is typed.
    element("p", { className: "error", hidden: !error, textContent: `As it was: ${error}.` }),
    terms([
      ["Denied", text],
      ["Override", own && `${own.limit} until ${date(own.ends_at)}, set by ${own.set_by ?? "the application"}${misfit(own)}`],
    ]),
    element("div", {}, ...(counts.length > 0 ? counts.map(countBlock) : [element("p", { textContent: "No limit was chosen for a request in this process yet." })])),
    element("div", { className: "buttons" },
      element("button", { type: "button", textContent: "Reset its counts and bans", onclick: () => confirm(of) }),
      ...(own ? [element("button", { type: "button", id: "end-override", className: "quiet", textContent: "End the override", onclick: () => endOverride(of) })] : [])),
    overrideForm(of),
  );
}

async function load() {
  const sent = performance.now();
  const loaded = await call(`/report?subjects=${SUBJECTS}`);
  // The report of a later request may have arrived before.
  if (sent >= latest) {
    [report, latest] = [loaded, sent];
    addToChart();
  }
  draw({ isLoaded: true });
}

const isDenied = ({ counts }) => counts.some(({ allowed, observed }) => !allowed && !observed);

// Which of several limits a request has is not known: its plan or its layer decides.
function denialOf({ policy, store, key, counts }) {
  const denying = counts.filter(({ allowed, observed }) => !allowed && !observed).length;
  return `${policyName(policy, store)} denies ${key}${denying < counts.length ? ` by ${denying} of its ${counts.length} limits` : ""}.`;
}

function subjectStatus(one) {
  const name = policyName(one.policy, one.store);
  const failure = failureOf(one);
  return failure ? `${name}: ${failure}.` : isDenied(one) ? denialOf(one) : `${name} admits ${one.key}.`;
}

function select({ policy, store }, key) {
  attempt(async (isLast) => {
    const selected = await post("/subject", { policy, store, key });
    if (!isLast()) {
      return "";
    }
    shown = selected;
    const failure = await failureOfLoading(load());
    if (isLast()) {
      sentence = () => subjectStatus(shown);
      subject.focus();
    }
    return subjectStatus(selected) + failure;
  });
}

function confirm(of) {
  asked = of;
  const isChosen = report?.policies.some(({ policy, store, limit }) => policy === of.policy && store === of.store && limit === null);
  const rest = isChosen ? " Its limits are chosen for each request: counts of a limit that this instance does not know stay." : "";
  question.replaceChildren(...words(`Remove all counts and bans of ${of.key} in ${policyName(of.policy, of.store)}?${rest}`));
  dialog.showModal();
}

// Loads everything again. A subject and a search that have an error stay as they were, with the error. Returns the last one.
async function reload() {
  const [search, of, action, turn] = [searched, shown, actions, ++reloads];
  // What is received after an action of the operator has begun may be older than what that shows.
  const isLast = () => action === actions && turn === reloads;
  let failure = null;
  if (search) {
    const newer = await post("/search", { text: search.text }).then((result) => ({ result, error: null }), ({ message: error }) => ({ error }));
    failure = newer.error;
    if (isLast()) {
      Object.assign(search, newer);
    }
  }
  if (of) {
    const { policy, store, key } = of;
    const newer = await post("/subject", { policy, store, key }).catch(({ message: error }) => ({ ...of, error }));
    failure = newer.error ?? failure;
    if (isLast() && shown === of) {
      shown = newer;
    }
  }
  await load();
  return failure;
}

// Refreshes the page while it is seen, one refresh after the other.
function refreshLater() {
  setTimeout(async () => {
    if (auto.checked && !document.hidden && !dialog.open) {
      try {
        const before = sentence?.();
        const failure = await reload();
        // A status is read aloud, so it is set only if it has changed.
        if (failure === null && before && before === status.textContent && sentence() !== before) {
          showStatus(sentence());
        }
      } catch (error) {
        time.textContent = `Not refreshed since ${report ? date(report.now) : "the page was opened"}: ${error.message}`;
        time.classList.add("error");
      }
    }
    refreshLater();
  }, PAUSE);
}

document.getElementById("look-up").addEventListener("submit", (event) => {
  event.preventDefault();
  search(keyInput.value);
});

refresh.addEventListener("click", () => {
  attempt(async () => {
    const failure = await reload();
    if (failure !== null) {
      throw new Error(`Refreshed in part: ${failure}.`);
    }
    // A search that has ended meanwhile has a status.
    return sentence?.() ?? "Refreshed.";
  }, { isRefresh: true });
});

for (const control of [filter, sort]) {
  control.addEventListener("input", drawPolicies);
}

document.getElementById("cancel").addEventListener("click", () => dialog.close());

document.getElementById("reset").addEventListener("click", () => {
  dialog.close();
  change(asked, "/reset", () => ({}), ({ policy, store, key }) => `The counts of ${key} in ${policyName(policy, store)} are reset.`);
});

attempt(async () => {
  await load();
  return report.policies.length > 0 ? "Ready." : "No layer or limiter was added.";
});
refreshLater();

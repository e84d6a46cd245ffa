
// The search over all policies.
function search(text) {
  attempt(async (isLast) => {
    const result = await post("/search", { text });
    if (!isLast()) {
      return "";
    }
    const own = { text, result };
    searched = own;
    [shown] = ranked(result.found);
    const failure = await failureOfLoading(load());
    if (isLast()) {
      sentence = () => searchStatus(text, own.result);
    }
    return searchStatus(text, own.result) + failure;
  });
}

// Why the counts are those of one process, which says nothing about the others.
const failureOf = ({ counts }) => counts.map(({ store_error: error }) => error).find(Boolean);

const isCounted = ({ counts, denied, override: own }) => denied || own || counts.some(({ allowed, reset_after_seconds: reset }) => !allowed || reset > 0);

// What denies first, and then what is not known.
function ranked(all) {
  const rank = (one) => (failureOf(one) ? 1 : isDenied(one) ? 0 : one.denied ? 2 : one.override ? 3 : isCounted(one) ? 4 : 5);
  return [...all].sort((one, other) => rank(one) - rank(other));
}

function searchStatus(text, { instance, found: all, incomplete, failed, unknown_hash: isUnknown }) {
  if (isUnknown && failed.length === 0 && !all.some((one) => failureOf(one) || isCounted(one))) {
    return `${instance} knows no subject by the hash ${text}.`;
  }
  const local = all.filter(failureOf).map((one) => ({ ...one, error: failureOf(one) }));
  const byError = new Map();
  for (const { policy, store, error } of [...failed, ...local]) {
    byError.set(error, [...(byError.get(error) ?? []), policyName(policy, store)]);
  }
  const failing = [...byError].map(([error, names]) => `${names.join(", ")}: ${error}.`);
  // Those without counts choose a limit by request, and have chosen none in this process.
  const decided = all.filter((one) => !failureOf(one) && one.counts.length > 0);
  if (decided.length > 0) {
    return [...failing, verdict(text, decided, failing.length + incomplete.length === 0 && decided.length === all.length)].join(" ");
  }
  if (failing.length > 0) {
    return failing.join(" ");
  }
  if (all.length > 0) {
    return `No limit was chosen for ${text} in this process yet.`;
  }
  return incomplete.length > 0 ? `No policy has ${text} alone as its key.` : `No policy has a key with ${text}.`;
}

function verdict(text, all, areAll) {
  const denying = all.filter(isDenied).map(denialOf);
  if (denying.length > 0) {
    return denying.join(" ");
  }
  const counted = all.some(isCounted);
  if (!counted && areAll) {
    return `Nothing is counted for ${text}.`;
  }
  if (all.length === 1) {
    return `${policyName(all[0].policy, all[0].store)} ${counted ? "admits" : "has counted nothing for"} ${all[0].key}.`;
  }
  return `${all.length} policies ${counted ? "admit" : "have counted nothing for"} ${text}.`;
}

function stateOf(one) {
  if (failureOf(one)) {
    return ["not known: the store fails", "bad"];
  }
  if (one.counts.length === 0) {
    return ["not known: no limit was chosen yet", ""];
  }
  // A ban may end before the limit admits again.
  const waitOf = ({ denial, banned_for_seconds: banned, retry_after_seconds: wait }) => (denial === "banned" ? banned : wait);
  const longest = (limit) => waitOf(limit) ?? Infinity;
  const denials = one.counts.filter(({ allowed }) => !allowed);
  const [denying] = denials.sort((one, other) => one.observed - other.observed || longest(other) - longest(one));
  if (!denying) {
    return ["admits", ""];
  }
  const seconds = waitOf(denying);
  const wait = seconds === null ? "" : ` for ${duration(seconds)}`;
  return [`${denying.observed ? "would deny" : "denies"}: ${denying.denial}${wait}`, "bad"];
}

function remainingOf({ counts }) {
  return counts.map(({ remaining, quota }) => (quota === null ? "unlimited" : `${remaining.toLocaleString()} of ${quota.toLocaleString()}`)).join(", ");
}

function foundRow(one) {
  const { policy, store, key, denied, override: own } = one;
  const [state, kind] = stateOf(one);
  const isShown = shown?.policy === policy && shown.store === store && shown.key === key;
  return tableRow(isShown,
    policyName(policy, store),
    lookUpButton(one, key),
    element("span", { className: `state ${kind}`, textContent: state }),
    remainingOf(one),
    denied ? `${times(denied.denials)}, last ${moment(denied.last_at)}` : "not listed",
    own ? `${own.limit}${misfit(own)}` : "",
  );
}

// A key without counts: it has more values, or its store fails.
function otherRow({ policy, store, key, error }) {
  return element("tr", {},
    element("td", { textContent: policyName(policy, store) }),
    element("td", {}, element("code", {}, ...words(key))),
    element("td", { colSpan: 4, className: error ? "error" : "quiet-text", textContent: error ?? "enter the other values of the key too, with | between them" }),
  );
}

function drawFound() {
  const { found: all, incomplete, failed } = searched?.result ?? { found: [], incomplete: [], failed: [] };
  const failure = searched?.error ? [element("tr", {}, element("td", { colSpan: 6, className: "error", textContent: `As it was: ${searched.error}.` }))] : [];
  drawRows(found, [...failure, ...ranked(all).map(foundRow), ...failed.map(otherRow), ...incomplete.map(otherRow)]);
}

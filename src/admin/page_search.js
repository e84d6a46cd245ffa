
// The search over all policies.
async function search(text) {
  const result = await post("/search", { text });
  const rank = (one) => (isDenied(one) ? 0 : one.denied ? 1 : one.override ? 2 : 3);
  searched = { text, result };
  const [first] = [...result.found].sort((one, other) => rank(one) - rank(other));
  shown = first;
  await load();
  showStatus(searchStatus(text, result));
}

function searchStatus(text, { found: all, incomplete, failed }) {
  const denying = all.filter(isDenied).map(({ policy, key }) => `${policy} denies ${key}.`);
  if (denying.length > 0) {
    return denying.join(" ");
  }
  const failing = failed.map(({ policy, error }) => `${policy}: ${error}.`).join(" ");
  if (all.length > 0) {
    return `${all.length === 1 ? `${all[0].policy} admits ${all[0].key}.` : `${all.length} policies admit ${text}.`} ${failing}`.trim();
  }
  return failing || (incomplete.length > 0 ? `No policy has ${text} alone as its key.` : `No policy has a key with ${text}.`);
}

function stateOf(one) {
  const denying = one.counts.find(({ allowed }) => !allowed);
  if (!denying) {
    return ["admits", ""];
  }
  const wait = denying.retry_after_seconds === null ? "" : ` for ${duration(denying.retry_after_seconds)}`;
  return [`${denying.observed ? "would deny" : "denies"}: ${denying.denial}${wait}`, "bad"];
}

function remainingOf({ counts }) {
  return counts.map(({ remaining, quota }) => (quota === null ? "unlimited" : `${remaining.toLocaleString()} of ${quota.toLocaleString()}`)).join(", ");
}

function foundRow(one) {
  const { policy, store, key, override: own } = one;
  const denied = one.denied;
  const [state, kind] = stateOf(one);
  const isShown = shown?.policy === policy && shown.store === store && shown.key === key;
  return element("tr", { className: isShown ? "found" : "" },
    element("td", { textContent: policyName(policy, store) }),
    element("td", {}, lookUpButton(one, key)),
    element("td", {}, element("span", { className: `state ${kind}`, textContent: state })),
    element("td", { textContent: remainingOf(one) }),
    element("td", { textContent: denied ? times(denied.denials) : "not listed" }),
    element("td", { textContent: own ? own.limit : "" }),
  );
}

// A key without counts: it has more values, or its store fails.
function otherRow({ policy, store, key, error }) {
  return element("tr", {},
    element("td", { textContent: policyName(policy, store) }),
    element("td", {}, element("code", { textContent: key })),
    element("td", { colSpan: 4, className: error ? "error" : "quiet-text", textContent: error ?? "enter the other values of the key too, with | between them" }),
  );
}

function drawFound() {
  const { found: all, incomplete, failed } = searched?.result ?? { found: [], incomplete: [], failed: [] };
  drawRows(found, [...all.map(foundRow), ...failed.map(otherRow), ...incomplete.map(otherRow)]);
}

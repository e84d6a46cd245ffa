
// The decisions of each policy over time, from the reports of one instance since the page was opened.
const SAMPLES = 60;
const LINES = 5;
const samples = new Map();

function addToChart() {
  const totals = new Map();
  for (const { policy, plan, store, decisions, denials } of report.policies) {
    totals.set(policyName(withPlan(policy, plan), store), { decisions, denied: denials.total });
  }
  const of = samples.get(report.instance) ?? [];
  const at = performance.now() / 1000;
  // Over a shorter time, a few decisions would look like a peak.
  if (at - of.at(-1)?.at < 1) {
    of.pop();
  }
  of.push({ at, totals });
  samples.set(report.instance, of.slice(-SAMPLES));
}

// The decisions and denials in a second between two samples; an instance that has started again counts from 0.
function rate(before, after, name) {
  const [from, to] = [before, after].map(({ totals }) => totals.get(name) ?? { decisions: 0, denied: 0 });
  const seconds = after.at - before.at;
  return {
    decisions: Math.max(to.decisions - from.decisions, 0) / seconds,
    denied: Math.max(to.denied - from.denied, 0) / seconds,
  };
}

const svg = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;

function drawing(name, attributes, ...children) {
  const made = document.createElementNS(svg, name);
  for (const [attribute, value] of Object.entries(attributes)) {
    made.setAttribute(attribute, value);
  }
  made.append(...children);
  return made;
}

const perSecond = (number) => `${number >= 10 ? Math.round(number).toLocaleString() : Number(number.toPrecision(2))} per second`;

function drawChart() {
  const of = samples.get(report.instance) ?? [];
  if (of.length < 2) {
    show(chart, element("p", { className: "quiet-text", textContent: "The chart begins with the next refresh." }));
    return;
  }
  const steps = of.slice(1).map((after, place) => [of[place], after]);
  const lines = [...of.at(-1).totals.keys()].map((name) => {
    const rates = steps.map(([before, after]) => ({ at: after.at, ...rate(before, after, name) }));
    return { name, rates, sum: rates.reduce((sum, { decisions }) => sum + decisions, 0) };
  });
  const shownLines = lines.filter(({ sum }) => sum > 0).sort((one, other) => other.sum - one.sum).slice(0, LINES);
  const highest = Math.max(...shownLines.flatMap(({ rates }) => rates.map(({ decisions }) => decisions)), 1);
  const [begin, end] = [of[0].at, of.at(-1).at];
  const place = ({ at, decisions }) => `${(600 * (at - begin)) / (end - begin)},${120 - (115 * decisions) / highest}`;
  const drawn = drawing("svg", { viewBox: "0 0 600 120", preserveAspectRatio: "none", role: "img", "aria-label": "Decisions per second by policy; the list has the numbers" },
    drawing("path", { class: "axis", d: "M0,119.5H600" }),
    ...shownLines.map(({ rates }, number) => {
      const points = [{ ...rates[0], at: begin }, ...rates].map(place);
      return drawing("polyline", { class: `line line-${number}`, points: points.join(" ") });
    }));
  const legend = shownLines.map(({ name, rates }, number) => {
    const { decisions, denied } = rates.at(-1);
    return element("li", {},
      drawing("svg", { viewBox: "0 0 24 8", class: "sample", "aria-hidden": "true" }, drawing("path", { class: `line line-${number}`, d: "M0,4H24" })),
      element("span", { textContent: `${name}: ${perSecond(decisions)}, ${perSecond(denied)} denied` }));
  });
  const range = `${report.instance} in the last ${duration(end - begin)}, at most ${perSecond(highest)}${lines.length > LINES ? `; the ${LINES} policies with most decisions` : ""}`;
  show(chart, drawn, element("p", { className: "quiet-text", textContent: shownLines.length > 0 ? range : `${report.instance} has decided about no request in the last ${duration(end - begin)}.` }), element("ul", { className: "legend" }, ...legend));
}

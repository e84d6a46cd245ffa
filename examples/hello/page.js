// The first item of a list of RFC 9651, such as `"say-hi";r=1;t=30`, with its whole numbers.
function parse(field) {
  const [, name, parameters] = /^\s*"([^"\\]*)"((?:;[^,]*)?)/.exec(field);
  const numbers = [...parameters.matchAll(/;\s*([a-z]+)=(\d+)/g)];
  return { name, ...Object.fromEntries(numbers.map(([, key, number]) => [key, Number(number)])) };
}

const seconds = () => performance.now() / 1000;

const HEIGHT = 132;
const TOP = 30; // The height of a full quota.
const BASE = 108;

class Route {
  responses = [];
  waits = false;

  constructor(article) {
    this.path = article.dataset.path;
    this.name = this.path.split("/").at(-1);
    article.innerHTML = `
      <div class="top"><h3>GET ${this.path}</h3><span class="state"></span><span class="count"></span></div>
      <svg class="timeline" role="img"></svg>
      <pre></pre>`;
    [this.state, this.count, this.timeline, this.fields] = article.querySelectorAll("span, svg, pre");
  }

  get last() {
    return this.responses.at(-1);
  }

  async call() {
    const response = await fetch(this.path, { cache: "no-store" });
    const { q, w } = parse(response.headers.get("RateLimit-Policy"));
    const { r, t } = parse(response.headers.get("RateLimit"));
    const wait = Number(response.headers.get("Retry-After") ?? 0);

    this.responses.push({ at: seconds(), q, w, r, t, wait });
    this.admission = wait > 0 ? this.admission : this.last;
    const names = ["Retry-After", "RateLimit-Policy", "RateLimit"].filter((name) => response.headers.has(name));
    const lines = names.map((name) => `${name}: ${response.headers.get(name)}`);
    this.fields.textContent = [`${response.status} ${response.statusText}`, ...lines].join("\n");
    this.draw(seconds());
    return wait > 0 ? { denied: `${this.name} (wait ${wait} s)` } : { admitted: `${this.name} (${r} left)` };
  }

  // The times until a request is admitted, and until the whole quota is left, which only an admission reports.
  times(now) {
    const left = (response, field) => Math.max(0, response.at + response[field] - now);
    return {
      wait: this.last ? left(this.last, "wait") : 0,
      reset: this.admission ? left(this.admission, "t") : undefined,
    };
  }

  draw(now) {
    const { wait, reset } = this.times(now);
    this.state.textContent = this.describe(wait, reset);
    if (!this.last) {
      return;
    }
    const { q, w } = this.last;
    const admitted = this.responses.filter((response) => response.wait === 0 && now - response.at < w).length;
    this.state.classList.toggle("waits", wait > 0);
    // The page has no responses of before, which count all the same.
    const period = now < w ? "since the page was loaded" : `in the last ${w} s`;
    this.count.textContent = `${admitted} admitted ${period}`;
    this.count.classList.toggle("over", admitted > q);
    if (this.waits && wait === 0) {
      status.textContent = `${this.name} admits again.`;
    }
    this.waits = wait > 0;

    // The last window is the left half, the next one the right half.
    const width = this.timeline.clientWidth || 320;
    const x = (at) => width / 2 + ((at - now) / w) * (width / 2);
    const y = (used) => BASE - (used / q) * (BASE - TOP);
    const shapes = [
      shape("rect", { class: "window", x: 0, y: TOP, width: width / 2, height: BASE - TOP }),
      shape("path", { class: "quota", d: `M0 ${TOP}H${width}` }),
    ];

    this.responses = this.responses.filter((response) => {
      return response === this.last || now - response.at < Math.max(w, response.wait);
    });
    for (const { at, wait } of this.responses.filter(({ wait }) => wait > 0)) {
      const [from, to] = [Math.max(0, x(at)), Math.min(width, x(at + wait))];
      shapes.push(shape("rect", { class: "wait", x: from, y: TOP, width: Math.max(0, to - from), height: BASE - TOP }));
    }
    for (const { at, q, r, wait } of this.responses) {
      const [left, top] = [x(at), wait > 0 ? TOP - 12 : y(q - r)];
      if (wait > 0) {
        shapes.push(shape("path", { class: "denied", d: `M${left - 4} ${top - 4}l8 8m0 -8l-8 8` }));
      } else {
        shapes.push(shape("path", { class: "stem", d: `M${left} ${BASE}V${top}` }));
        shapes.push(shape("circle", { class: "admitted", cx: left, cy: top, r: 5 }));
      }
    }
    if (reset > 0) {
      shapes.push(shape("path", { class: "reset", d: `M${x(now + reset)} ${TOP}V${BASE}` }));
    }

    shapes.push(
      shape("path", { class: "axis", d: `M0 ${BASE}H${width}` }),
      shape("path", { class: "now", d: `M${width / 2} ${TOP - 20}V${BASE + 4}` }),
      shape("text", { x: width / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "now"),
      shape("text", { x: 0, y: TOP - 8 }, `quota ${q}`),
      shape("text", { x: 0, y: HEIGHT - 6 }, `${w} s ago`),
      shape("text", { x: width, y: HEIGHT - 6, "text-anchor": "end" }, `in ${w} s`),
    );
    this.timeline.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.timeline.replaceChildren(...shapes);
    this.timeline.setAttribute("aria-label", `${this.path}: ${this.state.textContent}, ${this.count.textContent}`);
  }

  describe(wait, reset) {
    if (!this.last) {
      return "no response yet";
    }
    const { q, r } = this.last;
    if (wait > 0) {
      return `denied: wait ${Math.ceil(wait)} s`;
    }
    if (reset === 0) {
      return `${q} of ${q} left`;
    }
    return this.last.wait > 0 ? "admits again" : `${r} of ${q} left`;
  }
}

function shape(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  element.textContent = text;
  return element;
}

const status = document.querySelector("#status");
const groups = { "say-hi": [], all: [] };
for (const article of document.querySelectorAll("article")) {
  groups[article.dataset.group].push(new Route(article));
}
const routes = Object.values(groups).flat();

async function call(group) {
  try {
    const outcomes = await Promise.all(group.map((route) => route.call()));
    const list = (outcome) => outcomes.flatMap((of) => of[outcome] ?? []).join(", ");
    const parts = [["Admitted", list("admitted")], ["Denied", list("denied")]].filter(([, names]) => names);
    status.textContent = parts.map(([outcome, names]) => `${outcome}: ${names}.`).join(" ");
  } catch (error) {
    status.textContent = `The call failed: ${error.message}`;
  }
}

for (const button of document.querySelectorAll("[data-call]")) {
  button.addEventListener("click", () => call(groups[button.dataset.call]));
}

// When each call of the play is sent, as parts of the window.
const EDGE = [0, 0.9, 0.92, 0.94, 1.03, 1.05, 1.07, 1.09];
const play = document.querySelector("[data-play]");
let timers = [];

function stop() {
  timers.forEach(clearTimeout);
  timers = [];
  play.setAttribute("aria-pressed", false);
}

play.addEventListener("click", async () => {
  if (timers.length > 0) {
    return stop();
  }
  const group = groups[play.dataset.play];
  const later = (after, task) => timers.push(setTimeout(task, 1000 * after));
  play.setAttribute("aria-pressed", true);

  const waits = group.map((route) => route.times(seconds())).flatMap(({ wait, reset = 0 }) => [wait, reset]);
  const start = Math.max(...waits);
  status.textContent = `The play begins in ${Math.ceil(start)} s.`;
  later(start, async () => {
    await call(group);
    const { w } = group[0].last;
    EDGE.slice(1).forEach((part) => later(part * w, () => call(group)));
    later(EDGE.at(-1) * w, stop);
  });
});

const calm = matchMedia("(prefers-reduced-motion: reduce)");
function animate() {
  routes.forEach((route) => route.draw(seconds()));
  if (calm.matches) {
    setTimeout(animate, 1000);
  } else {
    requestAnimationFrame(animate);
  }
}
animate();

"use strict";

// One of several elements is shown; a text says which.
function leaf(elements, index) {
  elements.forEach((element, i) => { element.hidden = i !== index; });
}

// ---- samples: one prompt at a time, one moment of training at a time ----
for (const browser of document.querySelectorAll(".browser")) {
  const samples = [...browser.querySelectorAll(".sample")];
  const times = [...browser.querySelectorAll(".time")];
  let current = 0;
  const show = (index) => {
    current = (index + samples.length) % samples.length;
    leaf(samples, current);
    browser.querySelector(".count").textContent = `${current + 1} of ${samples.length}`;
  };
  if (samples.length > 1) {
    browser.querySelector(".leaf").hidden = false;
    const [back, on] = browser.querySelectorAll(".leaf button");
    back.addEventListener("click", () => show(current - 1));
    on.addEventListener("click", () => show(current + 1));
    show(0);
  }
  // The moment stays when the prompt changes: prompts are compared at the same step.
  const move = (value) => {
    for (const sample of samples) {
      const frames = [...sample.querySelectorAll(".frame")];
      const time = sample.querySelector(".time");
      if (!time) continue;
      const index = Math.min(Number(value), frames.length - 1);
      leaf(frames, index);
      time.querySelector("input").value = index;
      time.querySelector("output").textContent = frames[index].dataset.title;
    }
  };
  for (const time of times) {
    time.hidden = false;
    for (const title of time.parentElement.querySelectorAll("h5")) title.hidden = true;
    const input = time.querySelector("input");
    input.addEventListener("input", () => move(input.value));
  }
  if (times.length) move(times[0].querySelector("input").max);
}

// ---- tokens: blue above 0, orange below, full at the largest value but for a few ----
function values(token, place) {
  const value = token.dataset.v.split(",")[place];
  return value === undefined || value === "" ? NaN : Number(value);
}

function paint(root, name) {
  const found = [];
  for (const token of root.querySelectorAll(".token")) {
    const place = token.parentElement.dataset.names.split("|").indexOf(name);
    const value = place < 0 ? NaN : values(token, place);
    token.style.backgroundColor = "";
    if (Number.isFinite(value)) found.push([token, value]);
  }
  const sizes = found.map(([, value]) => Math.abs(value)).sort((a, b) => a - b);
  const largest = sizes[Math.ceil(0.98 * (sizes.length - 1))] || 1;
  for (const [token, value] of found) {
    const share = Math.min(1, Math.abs(value) / largest) * 0.75;
    if (share > 0.02) {
      const colour = value > 0 ? "--blue" : "--orange";
      token.style.backgroundColor = `rgb(var(${colour}) / ${share.toFixed(2)})`;
    }
  }
  const ends = root.querySelectorAll(".scale span");
  root.querySelector(".scale").hidden = !name;
  const below = found.some(([, value]) => value < 0);
  const above = found.some(([, value]) => value > 0);
  ends[0].textContent = below ? `\u2212${largest.toPrecision(2)}` : "0";
  ends[1].textContent = above ? `+${largest.toPrecision(2)}` : "0";
  root.querySelector(".scale i").className = below && above ? "" : below ? "below" : "above";
}

for (const root of document.querySelectorAll(".coloured")) {
  const choice = root.querySelector(".colour");
  if (!choice) continue;
  choice.hidden = false;
  const select = choice.querySelector("select");
  select.selectedIndex = Math.min(1, select.options.length - 1);
  select.addEventListener("change", () => paint(root, select.value));
  paint(root, select.value);
  root.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (!token || token.title) return;
    const names = token.parentElement.dataset.names.split("|");
    token.title = names.map((name, i) => `${name} ${values(token, i)}`).join("\n");
  });
}

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

// Shows the cells of a field beside the grid: of the field under the mouse, else of the field that was clicked.
"use strict";
const place = document.getElementById("told");
const hint = place.cloneNode(true);
let kept = null;

function show(field) {
  place.replaceChildren(...(field ? field.querySelector(".told") : hint).cloneNode(true).childNodes);
  document.querySelectorAll(".shown").forEach((each) => each.classList.remove("shown"));
  if (field) field.classList.add("shown");
}

for (const field of document.querySelectorAll(".cell")) {
  field.addEventListener("mouseenter", () => show(field));
  field.addEventListener("mouseleave", () => show(kept));
  field.addEventListener("focus", () => { kept = field; show(field); });
}
document.body.dataset.drawn = "yes";

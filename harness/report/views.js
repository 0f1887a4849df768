const picker = document.getElementById("model");
const MODEL = "#model=";

function isOf(element, model) {
  return model === "" || JSON.parse(element.dataset.models).includes(model);
}

// Shows what is about a model; sections and their links go where nothing of them is left.
function showModel(model) {
  for (const element of document.querySelectorAll("[data-models]")) {
    element.classList.toggle("elsewhere", !isOf(element, model));
  }
  for (const section of document.querySelectorAll("main > section")) {
    const parts = section.querySelectorAll("[data-models]");
    const gone = parts.length > 0 && section.querySelector("[data-models]:not(.elsewhere)") === null;
    section.classList.toggle("elsewhere", gone);
    document.querySelector(`nav a[href="#${section.id}"]`).classList.toggle("elsewhere", gone);
  }
}

function pickModel(model) {
  if (picker === null) return;
  picker.value = model;
  showModel(picker.value);
}

// What a link leads to is shown, whatever hides it at the moment.
function reveal(element) {
  if (element.closest(".elsewhere") !== null) pickModel("");
  element.classList.remove("filtered");
  const inner = element.querySelector(":scope > .fold") ?? element;
  for (let outer = inner.closest("details"); outer !== null; outer = outer.parentElement.closest("details")) {
    outer.open = true;
  }
  element.scrollIntoView();
}

function follow() {
  const fragment = window.location.hash;
  if (fragment.startsWith(MODEL)) {
    pickModel(decodeURIComponent(fragment.slice(MODEL.length)));
    return;
  }
  const target = document.querySelector(":target");
  if (target !== null) reveal(target);
}

if (picker !== null) {
  picker.addEventListener("change", () => {
    showModel(picker.value);
    const fragment = picker.value === "" ? "" : MODEL + encodeURIComponent(picker.value);
    window.history.replaceState(null, "", window.location.pathname + window.location.search + fragment);
  });
}
// On a phone the whole page is tens of screens long: what comes after the answer begins folded.
if (narrow.matches) {
  for (const fold of document.querySelectorAll(".fold")) fold.open = false;
}
document.querySelector("nav").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (link !== null) reveal(document.querySelector(link.hash)); // again, too, after it was folded
});
window.addEventListener("hashchange", follow);
follow();

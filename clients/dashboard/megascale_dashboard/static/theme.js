// Set before the page is drawn, so that it does not flash in the other theme.
(() => {
  const kept = localStorage.getItem("theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
})();

// The slider moves through the journal: the page of that entry is asked for, and what depends on it is replaced.
(() => {
  "use strict";
  document.addEventListener("change", (e) => { if (e.target.id === "pos") location.search = `?at=${e.target.value}`; });
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, textarea, select")) return;
    const step = e.key === "ArrowLeft" ? "-1" : e.key === "ArrowRight" ? "1" : null;
    const link = step && document.querySelector(`[data-step="${step}"]`);
    if (link) { e.preventDefault(); link.click(); }
  });
  const kept = sessionStorage.getItem("run-slider");
  if (kept === location.pathname) { sessionStorage.removeItem("run-slider"); document.getElementById("pos")?.focus(); }
  document.addEventListener("change", (e) => { if (e.target.id === "pos") sessionStorage.setItem("run-slider", location.pathname); });
})();

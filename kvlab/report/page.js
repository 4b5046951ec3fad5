"use strict";
// Sorts the table, fills the text, filters the samples. What stands behind # in the address does the same on load:
// #sort=accuracy, #show=lost, #text=1, #policy=2 (numbers of the two lists).
(() => {
  const $ = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  function sort(head) {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    const value = row => row.cells[column].dataset.sort;
    const numbers = [...body.rows].every(row => value(row) === "" || !isNaN(value(row)));
    const compare = numbers ? (a, b) => value(a) - value(b) : (a, b) => value(a).localeCompare(value(b));
    const was = head.getAttribute("aria-sort"), up = was ? was === "descending" : !numbers; // figures start with the greatest, words with a
    all("th", table.tHead).forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const missing = row => value(row) === ""; // at the end, whichever way
    body.append(...[...body.rows].sort((a, b) => missing(a) - missing(b) || (up ? compare(a, b) : compare(b, a))));
  }
  all(".figures thead th").forEach(head => $("button", head).addEventListener("click", () => sort(head)));

  function fillText() {
    const box = $("#kept-text");
    if (!box) return;
    const data = JSON.parse($("#kept-data").textContent), prompts = $("#kept-prompt"), policies = $("#kept-policy");
    const percent = share => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
    function marks(prompt, policy) {
      const found = new Map();
      for (const each of prompt.evidence)
        for (let i = 0; i < each.span.length; i += 2)
          for (let token = each.span[i]; token < each.span[i + 1]; token++)
            found.set(token, { right: each.right[policy], target: each.target });
      return found;
    }
    function show() {
      const prompt = data.prompts[prompts.value];
      for (const option of policies.options) option.disabled = !(option.value in prompt.shade);
      if (!(policies.value in prompt.shade)) policies.value = Object.keys(prompt.shade)[0];
      const policy = policies.value, shade = prompt.shade[policy], evidence = marks(prompt, policy), last = data.levels.length - 1;
      const pieces = document.createDocumentFragment();
      let held = 0, marked = 0; // of the tokens that are shown
      prompt.tokens.forEach((text, i) => {
        const token = document.createElement("span"), share = data.levels.indexOf(shade[i]) / last, mark = evidence.get(i);
        token.textContent = text === "\n" ? "⏎\n" : text;
        token.style.setProperty("--s", share.toFixed(3));
        token.title = `token ${i}: held by ${share === 0 || share === 1 ? "" : "about "}${percent(share)} of layers and heads`;
        if (share === 0) token.className = "gone";
        if (mark) {
          token.classList.add("evidence", ...(mark.right === undefined ? [] : [mark.right ? "right" : "wrong"]));
          token.title += `; part of the answer ${mark.target}`;
          held += share;
          marked++;
        }
        pieces.append(token);
      });
      box.classList.toggle("apart", prompt.apart);
      box.replaceChildren(pieces);
      box.scrollTop = 0;
      const cut = prompt.length > prompt.tokens.length ? `, the first ${prompt.tokens.length} shown` : "";
      const answers = marked ? `; a token of an answer by ${percent(held / marked)}` : "";
      $("#kept-sum").textContent = `${prompt.length} tokens${cut}. On average ${percent(prompt.mean[policy])} of layers and heads hold a token${answers}.`;
    }
    prompts.addEventListener("change", show);
    policies.addEventListener("change", show);
    policies.selectedIndex = Math.min(1, policies.options.length - 1);
    show();
    fillText.choose = (name, value) => {
      ({ text: prompts, policy: policies })[name].selectedIndex = value;
      show();
    };
  }

  function filterSamples() {
    const picker = $("#samples-policy");
    if (!picker) return;
    const buttons = all("#samples-kind button"), data = JSON.parse($("#samples-data").textContent);
    let kind = "all";
    function show() {
      let shown = 0;
      for (const row of all("#samples-table tbody tr")) {
        row.hidden = row.dataset.policy !== picker.value || (kind !== "all" && row.dataset.kind !== kind);
        shown += !row.hidden;
      }
      const counts = data[picker.value];
      for (const button of buttons) {
        button.setAttribute("aria-pressed", button.value === kind);
        button.textContent = `${button.value} ${counts[button.value].toLocaleString("en")}`;
      }
      $("#samples-sum").textContent = shown < counts[kind] ? `${shown} of them are on this page.` : "";
    }
    picker.addEventListener("change", show);
    buttons.forEach(button => button.addEventListener("click", () => { kind = button.value; show(); }));
    show();
  }

  fillText();
  filterSamples();
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name === "sort") $(`.figures th[data-column="${CSS.escape(value)}"] button`)?.click();
    if (name === "show") $(`#samples-kind button[value="${CSS.escape(value)}"]`)?.click();
    if (name === "text" || name === "policy") fillText.choose?.(name, Number(value));
  }
  document.documentElement.dataset.page = "ready";
})();

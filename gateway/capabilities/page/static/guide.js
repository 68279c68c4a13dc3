// A page of the guide: its contents, its diagrams as pictures, and the search.

import { el } from "./dom.js";
import * as search from "./search.js";

const MIN_HEADINGS = 4; // of a page that is long enough for a list of its contents

function showContents() {
  const headings = [...document.querySelectorAll(".guide h2[id]")];
  if (headings.length < MIN_HEADINGS) return;
  const links = headings.map((heading) => el("li", {}, el("a", { href: `#${heading.id}`, text: heading.textContent })));
  document.querySelector(".frame").append(el("nav", { class: "contents", "aria-labelledby": "contents-heading" },
    el("h2", { id: "contents-heading", text: "On this page" }), el("ul", {}, ...links)));
}

/** Show the pictures that `make diagrams` made of the diagrams of this page, in place of their source. */
function showDiagrams() {
  const { root, name } = document.documentElement.dataset;
  const page = name.replace(/\.md$/, "").replaceAll("/", "-");
  [...document.querySelectorAll(".language-mermaid")].forEach((code, index) => {
    const source = code.parentElement;
    const address = `${root}guide/diagrams/${page}-${index + 1}.svg`;
    const link = el("a", { href: address, title: "Open the diagram alone" }, el("img", { class: "diagram", alt: "Diagram", src: address }));
    link.firstChild.addEventListener("error", () => link.replaceWith(source));
    source.replaceWith(link);
  });
}

showContents();
showDiagrams();
search.start();

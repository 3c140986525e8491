// Elements made of text and attributes alone: nothing that anybody says of itself becomes markup.

const SVG = "http://www.w3.org/2000/svg";

const nodes = (children) => children.flat(3).filter((one) => one !== null && one !== undefined && one !== false).map((one) => (one instanceof Node ? one : document.createTextNode(String(one))));

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...nodes(children));
  return node;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// Set the text of a node only where it differs: what is the same is not laid out again.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

// Give a node these children. One that is the same stays: with the focus, its place in a list that was scrolled, and
// words that somebody has marked.
export function replace(node, ...children) {
  const wanted = nodes(children);
  wanted.forEach((one, at) => {
    const old = node.childNodes[at];
    if (!old) node.append(one);
    else if (old !== one && !old.isEqualNode(one)) old.replaceWith(one);
  });
  while (node.childNodes.length > wanted.length) node.lastChild.remove();
}

// Run `work` at the next frame, once, however often it is asked for.
export function atFrame(work) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; work(); });
  };
}

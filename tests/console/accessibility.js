// Faults of accessibility of the open page, as words; empty for none. (least, large): contrasts of text and of large text.
(least, large) => {
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].map((part) => part / 255);
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const luminance = (colour) => {
    const [r, g, b] = colour.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const styles = (node) => getComputedStyle(node);
  const above = (node) => { const found = []; for (let at = node; at; at = at.parentElement) found.push(at); return found; };
  const isShown = (node) => node.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true }) && node.getBoundingClientRect().width > 0;
  const name = (node) => (node.getAttribute("aria-label") ?? node.textContent ?? "").trim() || node.title || [...(node.labels ?? [])].map((label) => label.textContent).join("") || node.querySelector("img[alt]")?.alt;
  const words = (node) => `${node.tagName.toLowerCase()}.${node.getAttribute("class") ?? ""} ${(node.textContent ?? "").trim().slice(0, 40)}`;
  const faults = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.closest("svg, option, noscript") || !isShown(node)) continue;
    const chain = above(node);
    if (chain.some((at) => Number(styles(at).opacity) < 1 || styles(at).backgroundImage !== "none")) continue;
    const layers = chain.map((at) => rgba(styles(at).backgroundColor));
    let ground = [1, 1, 1];
    for (const layer of layers.reverse()) ground = over(layer, ground);
    const text = over(rgba(styles(node).color), ground);
    const [light, dark] = [luminance(text), luminance(ground)].sort((a, b) => b - a);
    const size = parseFloat(styles(node).fontSize), isLarge = size >= 24 || (size >= 18.66 && Number(styles(node).fontWeight) >= 700);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < (isLarge ? large : least)) faults.push(`contrast ${contrast.toFixed(2)}: ${words(node)}`);
  }
  for (const node of document.querySelectorAll("a[href], button, select, textarea, input"))
    if (isShown(node) && !name(node)) faults.push(`no name: ${words(node)}`);
  for (const node of document.querySelectorAll("[role=img], [role=group], [role=progressbar]"))
    if (isShown(node) && !node.getAttribute("aria-label")) faults.push(`no label: ${words(node)}`);
  for (const node of document.querySelectorAll("img:not([alt])")) faults.push(`no alt: ${words(node)}`);
  for (const node of document.querySelectorAll("table")) if (!node.querySelector("th[scope]")) faults.push(`no header: ${words(node)}`);
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids.filter((id, index) => ids.indexOf(id) !== index))) faults.push(`id twice: ${id}`);
  if (document.querySelectorAll("main").length !== 1 || !document.documentElement.lang || !document.title) faults.push("main, lang or title");
  if (!document.querySelector("main h1")) faults.push("no h1");
  return [...new Set(faults)];
}

// What a reader sees of the page's texts: their contrast, and whether something cuts or covers them.
() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });

  // Red, green, blue (0 to 255) and alpha (0 to 1) of any colour of CSS.
  function parsed(colour) {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, alpha / 255];
  }

  const over = (front, back, opacity = 1) =>
    [0, 1, 2].map((i) => front[i] * front[3] * opacity + back[i] * (1 - front[3] * opacity));

  function luminance(colour) {
    const [r, g, b] = colour.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function contrast(one, other) {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }

  function* upwards(element) {
    for (let one = element; one; one = one.parentElement) yield one;
  }

  const opacity = (element) => [...upwards(element)].reduce((all, one) => all * getComputedStyle(one).opacity, 1);

  // The colour of what is painted below an element, at a point of the window.
  function ground(element, x, y) {
    const stack = document.elementsFromPoint(x, y);
    const own = stack.indexOf(element);
    return stack.slice(Math.max(0, own)).reverse().reduce((back, one) => {
      const style = getComputedStyle(one);
      const isShape = one instanceof SVGGeometryElement;
      const paint = isShape ? style.fill : style.backgroundColor;
      if (one instanceof SVGElement && !isShape) return back;
      return paint === "none" ? back : over(parsed(paint), back, opacity(one));
    }, parsed(getComputedStyle(document.documentElement).colorScheme === "dark" ? "#000" : "#fff"));
  }

  function scrolled(element) {
    element.scrollIntoView({ block: "center", inline: "nearest", behavior: "instant" });
  }

  // Of each part of the text its place in the window.
  function rects(node) {
    const range = document.createRange();
    range.selectNodeContents(node);
    return [...range.getClientRects()].filter((box) => box.width > 0 && box.height > 0);
  }

  // What may hide a part of its text: code scrolls, and these show the whole text in another way.
  const MAY_CUT = "pre, #token-text, #example-list span";

  function cutBy(element, box) {
    if (element.closest(MAY_CUT)) return "";
    if (box.left < 0 || box.right > innerWidth) return "the window";
    for (const one of upwards(element)) {
      const outer = one.getBoundingClientRect();
      const cuts = one instanceof HTMLElement && getComputedStyle(one).overflowX !== "visible";
      const beyond = box.left < outer.left - 1 || box.right > outer.right + 1;
      if (beyond && (cuts || one.matches("button, .card"))) return one.id || one.className || one.tagName;
    }
    return "";
  }

  const root = document.querySelector("dialog:modal") ?? document.body; // the rest is inert
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const element = node.parentElement;
    if (!node.data.trim() || element.closest(".hidden, script, option") || !element.checkVisibility()) continue;
    if (getComputedStyle(element).clipPath !== "none" || [...upwards(element)].some((one) => getComputedStyle(one).clipPath !== "none")) continue;
    scrolled(element);
    const [box] = rects(node);
    if (!box) continue;
    const style = getComputedStyle(element);
    const back = ground(element, box.left + Math.min(8, box.width / 2), (box.top + box.bottom) / 2);
    const ink = over(parsed(element instanceof SVGElement ? style.fill : style.color), back, opacity(element));
    found.push({
      text: node.data.trim().slice(0, 40),
      at: element.id || element.className?.baseVal || element.className || element.tagName,
      contrast: contrast(ink, back),
      cut: rects(node).map((one) => cutBy(element, one)).find(Boolean) ?? "",
    });
  }
  for (const field of root.querySelectorAll("[placeholder]")) {
    if (!field.checkVisibility()) continue;
    const style = getComputedStyle(field, "::placeholder");
    scrolled(field);
    const box = field.getBoundingClientRect();
    const back = ground(field, (box.left + box.right) / 2, (box.top + box.bottom) / 2);
    pen.font = getComputedStyle(field).font;
    const { paddingLeft, paddingRight } = getComputedStyle(field);
    const room = field.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
    found.push({
      text: field.placeholder,
      at: `placeholder of ${field.id}`,
      contrast: contrast(over(parsed(style.color), back, style.opacity * opacity(field)), back),
      cut: pen.measureText(field.placeholder).width > room ? "the field" : "",
    });
  }
  return found;
}

// Search without a server: browsers refuse workers of pages that are opened as files, so a hidden frame does the work.
// The frame runs the worker's script in a window of its own; messages between both are events, as between threads.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.onmessage?.(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = new URL(address, location.href).href
      script.onload = () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      }
      inside.document.head.appendChild(script)
    }

    postMessage(data) {
      if (this.waiting) return void this.waiting.push(data)
      const inside = this.frame.contentWindow
      const event = new inside.MessageEvent("message", { data: structuredClone(data) })
      setTimeout(() => inside.dispatchEvent(event))
    }

    terminate() {
      this.frame.remove()
    }
  }
}

// An agent of Vercel's AI SDK: the second turn refers to the items of the first one's response.
const { readFileSync } = require('node:fs')
const { createOpenAI } = require('@ai-sdk/openai')
const { generateText, stepCountIs, tool } = require('ai')
const { z } = require('zod')

async function main() {
  const row = JSON.parse(readFileSync(0, 'utf8'))
  const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY })
  const calculator = tool({
    description: 'Compute an expression.',
    inputSchema: z.object({ expression: z.string() }),
    execute: async ({ expression }) => String(expression.split('+').reduce((sum, term) => sum + Number(term), 0)),
  })
  const { text } = await generateText({
    model: openai.responses('policy'),
    prompt: row.prompt[0].content,
    tools: { calculator },
    stopWhen: stepCountIs(5),
    maxRetries: 0,
  })
  console.log(text)
}

main().catch((error) => {
  console.error(error.responseBody ?? error)
  process.exit(1)
})

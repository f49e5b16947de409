// What the page shows one of at a time.
export interface View {
  close: () => void;
  /** Moves within the view; false when the address is of another one. */
  go?: (name: string, rest: string[]) => boolean;
}

export type Refused = (error: unknown) => HTMLElement;
